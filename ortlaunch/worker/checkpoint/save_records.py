"""saves.jsonl: every save of a run, over all starts. Rank 0 writes it."""

from __future__ import annotations

import contextlib

from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line, read_json_lines_with_keys
from ortlaunch.run_folder.records import SaveLine, json_values_of_record


def append_save_line_unless_disk_full(run: RunDir, save_line: SaveLine) -> None:
    """Add a line; on a full disk it is left out, because the log has it, too."""
    with contextlib.suppress(OSError):
        append_json_line(run.saves, json_values_of_record(save_line))


def readable_save_records(run: RunDir) -> list[dict[str, object]]:
    """Return all readable lines."""
    return read_json_lines_with_keys(run.saves, "step").values


def checkpoint_steps_without_save_line(run: RunDir) -> list[int]:
    """Return the steps of complete checkpoints without a line, as their writer died too early."""
    recorded_steps = {line["step"] for line in readable_save_records(run) if "error" not in line}
    return [step for step, _ in run.complete_checkpoints() if step not in recorded_steps]


def failed_save_count(run: RunDir) -> int:
    """Return how many saves failed, over all starts."""
    return sum("error" in line for line in readable_save_records(run))

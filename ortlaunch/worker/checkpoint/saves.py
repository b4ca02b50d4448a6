"""saves.jsonl: every save of a run, over all starts. Rank 0 writes it."""

from __future__ import annotations

import contextlib

from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line, read_json_lines
from ortlaunch.run_folder.records import SaveLine, as_json


def record(run: RunDir, line: SaveLine) -> None:
    """Add a line; on a full disk it is left out, because the log has it, too."""
    with contextlib.suppress(OSError):
        append_json_line(run.saves, as_json(line))


def records(run: RunDir) -> list[Json]:
    """Return all readable lines."""
    return read_json_lines(run.saves, "step").values


def untold(run: RunDir) -> list[int]:
    """Return the steps of complete checkpoints without a line, as their writer died too early."""
    told = {line["step"] for line in records(run) if "error" not in line}
    return [step for step, _ in run.complete_checkpoints() if step not in told]


def failures(run: RunDir) -> int:
    """Return how many saves failed, over all starts."""
    return sum("error" in line for line in records(run))

"""saves.jsonl: every save of a run and what its command came to, over all starts. Rank 0 writes it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ortlaunch.run.folder import RunDir, json_text
from ortlaunch.run.records import CommandLine, SaveLine, as_json


def record(run: RunDir, line: SaveLine | CommandLine) -> None:
    """Add a line; on a full disk it is left out, for the log has it, too."""
    with contextlib.suppress(OSError), run.saves.open("a", encoding="utf-8") as file:
        file.write(json_text(as_json(line)) + "\n")


def records(run: RunDir) -> list[dict[str, Any]]:
    """All lines; a last one that was half written is none."""
    lines = run.saves.read_text(encoding="utf-8").splitlines(keepends=True) if run.saves.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def untold(run: RunDir) -> list[int]:
    """Complete checkpoints without a line: whoever wrote them died before it could say so."""
    told = {line["step"] for line in records(run) if "error" not in line}
    return [step for step, _ in run.complete_checkpoints() if step not in told]


def failures(run: RunDir) -> tuple[int, int]:
    """(saves, commands) that failed, over all starts."""
    found = records(run)
    return sum("error" in line for line in found), sum(bool(line.get("status")) for line in found)

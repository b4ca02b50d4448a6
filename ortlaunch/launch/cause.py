"""How a run ended: the first failing rank, its status and its last words, read from the run folder."""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

from ortlaunch.rundir import RunDir, read_json


class End(NamedTuple):
    """The command's exit status, and what to print last."""

    status: int
    text: str


def explain_end(run: RunDir, status: int, stopped_by: int | None = None) -> End:
    """The end of a run whose launcher left with `status`, because the user sent the signal `stopped_by` if not None."""
    records = [read_json(path) for path in sorted(run.errors.glob("rank_*.json"))]
    first = _first(records)
    if stopped_by is not None:
        return End(128 + stopped_by, _stopped_text(run, first, stopped_by))
    if first is None and status == 0:
        return End(0, f"done: {run}")
    lost = _vanished(run, records) if status and (first is None or first["secondary"]) else []
    if lost:
        return End(137, _lost_text(run, lost))
    if first is None:
        return End(
            status,
            f"ortlaunch: the launcher ended with status {status}, and no rank says why; see above, and {run.logs}",
        )
    return End(first["exit_status"], _text(first))


def _first(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The earliest failure that is not the echo of another's."""
    ordered = sorted(records, key=lambda record: (record["secondary"], record["time"]))
    return ordered[0] if ordered else None


def _vanished(run: RunDir, records: list[dict[str, Any]]) -> list[int]:
    """Ranks that began and left neither an error nor an end: their guardian was killed."""
    known = {record["rank"] for record in records}
    sent = run.request.stat().st_mtime_ns  # older logs are of an earlier run in this folder
    logs = [path for path in run.logs.glob("rank_*.err") if path.stat().st_mtime_ns >= sent]
    return sorted({int(path.stem[len("rank_") :]) for path in logs} - known)


def _stopped_text(run: RunDir, first: dict[str, Any] | None, number: int) -> str:
    told = f"{_text(first)}\n" if first and not first["secondary"] else ""
    saved = run.complete_checkpoints()
    mend = f"; to go on after step {saved[-1][0]}, give --run-dir {run}" if saved else ""
    return f"{told}ortlaunch: stopped by {signal.Signals(number).name}{mend}"


def _lost_text(run: RunDir, ranks: list[int]) -> str:
    hosts = read_json(run.plan)["nodes"]
    names = [f"rank {rank} on host {_host(hosts, rank)}" for rank in ranks[:8]]
    return (
        f"ortlaunch: {', '.join(names)} vanished without a word, as a process killed by SIGKILL does (often the "
        f"kernel's out-of-memory killer: see dmesg there)\nlogs: {run.logs}"
    )


def _host(nodes: list[dict[str, Any]], rank: int) -> str:
    name: str = next(node["host"] for node in reversed(nodes) if node["first_rank"] <= rank)
    return name


def _text(first: dict[str, Any]) -> str:
    said = f"{first['traceback'].rstrip()}\n\n" if first["traceback"] else ""
    return f"{said}ortlaunch: {first['summary']}"

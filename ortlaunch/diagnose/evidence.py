"""What a run folder holds about its end, read once. Nothing is judged here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.cause import Cause, Failure
from ortlaunch.json_types import Json
from ortlaunch.plan import Plan
from ortlaunch.run_folder.folder import RunDir, account
from ortlaunch.run_folder.lines import Lines, take_line

_LAST_LINES = 12
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True)
class Evidence:
    """What is known of an end."""

    run: RunDir
    state: str
    """As `ortlaunch status` says it."""
    status: int | None
    """The exit status of the command; None: it has not ended."""
    text: str
    """What the command said last; "" where it said nothing."""
    failure: Failure | None
    """Why, as the command recorded it."""
    records: list[Json]
    """Accounts of ranks that failed, and of a run that stood still; the cause first."""

    @property
    def first(self) -> Json:
        """The account of the cause; empty where no rank gave one of its own.

        A rank that stopped as it was asked to is the cause where the command blames it: a launcher, too, asks for that.
        """
        own = self.records[0] if self.records and not self.records[0]["secondary"] else {}
        blamed = (
            self.failure is not None
            and self.failure.cause is Cause.STOPPED
            and self.failure.rank is not None
        )
        return {} if own and own["cause"] is Cause.STOPPED and not blamed else own

    @property
    def plan(self) -> Plan | None:
        """The plan, where the run came so far."""
        return Plan.read(self.run.plan) if self.run.plan.exists() else None


def read(
    run: RunDir, state: str, status: int | None, text: str, failure: Failure | None
) -> Evidence:
    """Read what the ranks left."""
    records = [account(path) for path in run.told]
    return Evidence(
        run,
        state,
        status,
        text,
        failure,
        sorted(records, key=lambda one: (one["secondary"], one["time"])),
    )


def last_lines(run: RunDir, rank: int) -> list[str]:
    """The end of a rank's error log."""
    return _tail(run.log(rank, "err"))[-_LAST_LINES:]


def json_lines(path: Path, *names: str) -> list[Json]:
    """The last whole lines of a file of JSON lines that have these names."""
    lines = Lines([], [])
    for line in _tail(path):  # the first may be cut, the last half written
        take_line(lines, path.name, line.encode(), *names)
    return lines.found


def _tail(path: Path) -> list[str]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []

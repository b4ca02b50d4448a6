"""errors/*.json: how a rank ended, the ranks stalled, or a host was lost.

One class for the writers and the readers of the file. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import DamagedFile
from ortlaunch.base.json_types import Json, value_fits_annotation_at_any_depth
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import json_values_of_record

# Types of ends that only the supervisor saw. Their traceback is the end of the rank's own output.
_SEEN_BY_SUPERVISOR = ("Signal", "Exit")


@dataclass(frozen=True)
class ErrorRecord:
    """The end of a rank (errors/rank_N.json), a stall (stall.json) or a lost host (lost.json)."""

    type: str
    """Class of the exception, or `Signal`, `Exit`, `Outlived`, `Stopped`, `Stall`, `LostHost`."""
    cause: Cause
    """The cause, as in job.json."""
    exit_status: int
    """Exit status of the rank."""
    rank: int = 0
    """The rank; of a stall the first that the others wait for."""
    host: str = "?"
    """Host of the rank."""
    detail: str = ""
    """The decisive line of the error, the library or the kernel."""
    message: str = ""
    """The message of the exception."""
    traceback: str = ""
    """The whole traceback; of an end that only the supervisor saw, the last lines of the log."""
    folded: str | None = None
    """The traceback without frames of libraries."""
    raised_at: str | None = None
    """Line of the user's own files where the error was raised."""
    summary: str = ""
    """The line that is printed."""
    secondary: bool = False
    """Whether another rank's end, or a request to end, caused this one."""
    signal: int | None = None
    """The signal that ended the rank."""
    time: float = 0.0
    """Seconds since 1970."""
    after: int = 0
    """Number of error records that were counted before this one."""
    step: int | None = None
    """Completed optimizer steps."""
    phase: str | None = None
    """Part of a step in which it ended."""
    local_rank: int | None = None
    """Number of the rank on its host."""
    pid: int | None = None
    """Process id of the rank."""
    memory_limit: Json | None = None
    """Name and bytes of the smallest memory limit of the host."""
    memory_kills: int | None = None
    """Processes that the kernel's out-of-memory killer ended."""
    still_seconds: float | None = None
    """Of a stall: seconds without progress of any rank."""
    behind: list[int] | None = None
    """Of a stall: the ranks that the others wait for."""
    never_heard: list[int] | None = None
    """Of a stall: ranks whose supervisors sent no heartbeat."""
    ranks: list[Json] | None = None
    """Of a stall: the last heartbeat of each rank."""

    @property
    def is_seen_by_supervisor_only(self) -> bool:
        """Whether the rank recorded nothing, so that its traceback is the end of its output."""
        return self.type in _SEEN_BY_SUPERVISOR

    @property
    def is_own_error(self) -> bool:
        """Whether it is an error of ortlaunch's own, which has its message in place of a traceback."""
        return bool(self.message) and self.message == self.traceback

    @property
    def likeliest_cause_first_sort_key(self) -> tuple[bool, bool, int, float]:
        """The most likely cause of a run's end comes first.

        Original failures come before secondary ones. Of the latter, ranks come first that were
        killed because they had not saved in the grace period (OUTLIVED).
        """
        # Hosts' clocks differ, so the count of earlier records comes before the time.
        return self.secondary, self.cause is not Cause.OUTLIVED, self.after, self.time

    def to_failure(self) -> Failure:
        """Return the cause with its details, for a verdict."""
        return Failure(
            cause=self.cause,
            detail=self.detail,
            rank=self.rank,
            host=self.host,
            signal=self.signal,
            status=self.exit_status,
            step=self.step,
            memory_kills=self.memory_kills,
            raised_at=self.raised_at or "",
        )

    def to_json(self) -> Json:
        """Return the contents of the file."""
        contents: Json = json_values_of_record(self)
        return contents

    def write(self, record_path: Path) -> None:
        """Write the file atomically."""
        write_json_atomically(record_path, self.to_json())


def read_error_record_or_describe_damage(record_path: Path) -> ErrorRecord:
    """Read an error record of a rank or of the whole run.

    Returns:
        The record, with defaults for fields that are missing or have another type. A damaged file
        gives a record that names the damage.
    """
    # `rank_00003.json` has a number; stall.json and lost.json have none.
    rank_digits = record_path.stem.removeprefix("rank_")
    summary = f"{record_path} has no summary"
    try:
        values = read_json_or_raise_damaged(record_path)
    except DamagedFile as error:
        values = {}
        summary = f"the record of a rank's end cannot be read: {error}"
    defaults: dict[str, Any] = {
        "type": "Unknown",
        "cause": "",
        "exit_status": 1,
        "rank": int(rank_digits) if rank_digits.isdecimal() else 0,
        "detail": summary,
        "summary": summary,
    }
    valid = {
        name: values[name]
        for name, annotation in get_type_hints(ErrorRecord).items()
        if name in values
        and name != "cause"
        and value_fits_annotation_at_any_depth(annotation, values[name])
    }
    cause_text = values.get("cause")
    fields = {
        **defaults,
        **valid,
        "cause": Cause(cause_text if isinstance(cause_text, str) else ""),
    }
    return ErrorRecord(**fields)


def read_error_records(run: RunDir) -> list[ErrorRecord]:
    """Return the records of ranks, of a run that made no progress, and of a lost host."""
    return [
        read_error_record_or_describe_damage(record_path) for record_path in run.error_record_paths
    ]


def most_likely_cause(records: list[ErrorRecord]) -> ErrorRecord | None:
    """Return the record of the failure that most likely caused the others; None without records."""
    return min(records, key=lambda record: record.likeliest_cause_first_sort_key, default=None)


def first_error_record(run: RunDir) -> ErrorRecord | None:
    """Return the record of the earliest original failure, else of a secondary one."""
    return most_likely_cause(read_error_records(run))


def ranks_whose_supervisor_started(run: RunDir) -> set[int]:
    """Return the ranks whose supervisor started."""
    # Older logs belong to an earlier run in this folder.
    request_time_ns = run.request.stat().st_mtime_ns
    logs = [
        path for path in run.logs.glob("rank_*.err") if path.stat().st_mtime_ns >= request_time_ns
    ]
    return {int(path.stem[len("rank_") :]) for path in logs}

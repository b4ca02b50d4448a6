"""Why a rank or a run ended, as data: decided where it is seen, recorded, and compared by value, never by its text.

run_folder/cause_text.py renders it. Imports nothing of ortlaunch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Cause(str, Enum):
    """Why a rank or a run ended; the values are in errors/*.json, job.json and `ortlaunch diagnose --json`."""

    RUNNING = "running"
    ENDED_WELL = "ended-well"
    STOPPED = "stopped"
    OUTLIVED = "outlived"  # it was killed once its time to stop was over
    HANG = "hang"
    HOST_LOST = "host-lost"
    NOT_FINITE = "not-finite"
    GRADIENT_NOT_FINITE = "gradient-not-finite"  # and every loss is
    LOSS_SCALE_COLLAPSE = "loss-scale-collapse"
    LOSS_SPIKE = "loss-spike"
    OUT_OF_MEMORY = "out-of-memory"
    DISK_FULL = "disk-full"
    CRASH = "crash"
    KILLED = "killed"
    SIGNALLED = "signalled"
    PORT_TAKEN = "port-taken"
    NO_GPU = "no-gpu"
    OTHER_WORLD = "other-world"
    INDEX_OUT_OF_RANGE = "index-out-of-range"
    MISSING_MODULE = "missing-module"
    MISSING_FILE = "missing-file"
    UNREADABLE_FILE = "unreadable-file"
    NO_LOCKS = "no-locks"
    DAMAGED_CHECKPOINT = "damaged-checkpoint"
    LEFT_EARLY = "left-early"
    BAD_INPUT = "bad-input"
    RAISED = "raised"
    COMMAND_KILLED = "command-killed"
    LAUNCHER_KILLED = "launcher-killed"
    LAUNCHER_FAILED = "launcher-failed"
    RANK_VANISHED = "rank-vanished"
    NEVER_BEGAN = "never-began"
    LOST_PEERS = "lost-peers"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        """Of another version, or a damaged file."""
        return cls.UNKNOWN


@dataclass(frozen=True)
class Failure:
    """A cause with its fields; what does not apply is None or empty."""

    cause: Cause
    detail: str = ""
    """The line that shows it, of the library, the kernel or the error."""
    rank: int | None = None
    """The rank that failed first; None: no rank tells a failure of its own."""
    host: str | None = None
    """Of that rank."""
    who: str = ""
    """Ranks or the program that the command blames, where no rank tells a failure of its own."""
    signal: int | None = None
    step: int | None = None
    """Steps that were done."""
    status: int | None = None
    """Exit status of the rank, or of the launcher."""
    began: int = 0
    """How many ranks began."""
    memory_kills: int | None = None
    """Processes that the kernel's out-of-memory killer ended meanwhile; None: not known."""
    raised_at: str = ""
    """The line of the user's own files."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Failure:
        """Of a rank's record in errors/."""
        return cls(
            cause=Cause(record["cause"]),
            detail=record["detail"],
            rank=record["rank"],
            host=record["host"],
            signal=record["signal"],
            status=record["exit_status"],
            step=record.get("step"),
            memory_kills=record.get("memory_kills"),
            raised_at=record.get("raised_at", ""),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Failure:
        """Of job.json; names that a later version may have added are left out."""
        known = {name: values[name] for name in asdict(cls(Cause.UNKNOWN)) if name in values}
        return cls(**{**known, "cause": Cause(values.get("cause"))})

    @property
    def place(self) -> str:
        """Where it was, for a person."""
        return "the run" if self.rank is None else f"rank {self.rank} on host {self.host}"

    @property
    def kind(self) -> Cause:
        """The cause, with that of a process which the kernel ended: memory."""
        ended = (Cause.RANK_VANISHED, Cause.LAUNCHER_KILLED, Cause.NEVER_BEGAN)
        return Cause.OUT_OF_MEMORY if self.memory_kills and self.cause in ended else self.cause

    @property
    def may_be_memory(self) -> bool:
        """Whether it is memory, or a SIGKILL, which the kernel sends without a record where memory ends."""
        return self.kind in (Cause.OUT_OF_MEMORY, Cause.RANK_VANISHED) or self.signal == 9

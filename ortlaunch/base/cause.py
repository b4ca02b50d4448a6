"""The cause of an end of a rank or run, as data: recorded where it is detected, compared by value.

run_folder/cause_text.py renders it. Imports nothing of ortlaunch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):  # noqa: UP042  # its text is its value in every f-string
    """The cause of an end, as in errors/*.json, job.json and `ortlaunch diagnose --json`."""

    RUNNING = "running"
    ENDED_WELL = "ended-well"
    # The run ended as requested: by a signal, a scheduler or `ortlaunch stop`.
    STOPPED = "stopped"
    OUTLIVED = "outlived"  # killed, because it had not ended in the grace period
    HANG = "hang"
    HOST_LOST = "host-lost"
    NOT_FINITE = "not-finite"
    GRADIENT_NOT_FINITE = "gradient-not-finite"  # while every loss is finite
    LOSS_SCALE_COLLAPSE = "loss-scale-collapse"
    LOSS_SPIKE = "loss-spike"
    OUT_OF_MEMORY = "out-of-memory"
    DISK_FULL = "disk-full"
    CRASH = "crash"
    GRAPH_CRASH = "graph-crash"  # in ONNX Runtime's graph
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
        """Return UNKNOWN for a value of another version or a damaged file."""
        return cls.UNKNOWN


@dataclass(frozen=True)
class Failure:
    """A cause with its details; fields that do not apply are None or empty."""

    cause: Cause
    """The cause, such as `out-of-memory`, `crash` or `missing-file`."""
    detail: str = ""
    """The decisive line of the library, the kernel or the error."""
    rank: int | None = None
    """The rank that failed first; None if no rank recorded a failure of its own."""
    host: str | None = None
    """Host of that rank."""
    who: str = ""
    """Ranks or program that the command blames, if no rank recorded a failure of its own."""
    signal: int | None = None
    """The signal that ended the rank or the program."""
    step: int | None = None
    """Completed optimizer steps."""
    status: int | None = None
    """Exit status of the rank, or of the launcher."""
    began: int = 0
    """Number of ranks that began."""
    memory_kills: int | None = None
    """Processes that the kernel's out-of-memory killer ended during the run; None if unknown."""
    raised_at: str = ""
    """Line of the user's own files where the error was raised."""

    @property
    def rank_and_host(self) -> str:
        """The location of the failure, as text."""
        return "the run" if self.rank is None else f"rank {self.rank} on host {self.host}"

    @property
    def cause_or_out_of_memory_if_killed(self) -> Cause:
        """The cause, with OUT_OF_MEMORY if the kernel ended the process for memory."""
        # These causes name only that a process is gone; the kernel's count gives the reason.
        vanished_causes = (Cause.RANK_VANISHED, Cause.LAUNCHER_KILLED, Cause.NEVER_BEGAN)
        return (
            Cause.OUT_OF_MEMORY
            if self.memory_kills and self.cause in vanished_causes
            else self.cause
        )

    @property
    def is_or_may_be_out_of_memory(self) -> bool:
        """Whether the cause is or may be memory: the kernel ends a process by SIGKILL, often
        without a record."""
        return (
            self.cause_or_out_of_memory_if_killed in (Cause.OUT_OF_MEMORY, Cause.RANK_VANISHED)
            or self.signal == 9
        )

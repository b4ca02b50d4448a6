"""Start the processes of a plan: each backend builds a Request without side effects.

Only `submit`, `state`, `wait` and `cancel` act on processes. Backends are named by string and
imported on first use, so that an absent one costs nothing. This package may import the plan's
types, run_folder and errors, but never the recipe or the worker.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ortlaunch.launch.stop import Stop
from ortlaunch.launchers import LAUNCHERS
from ortlaunch.plan import Node, Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir

# Seconds that a launcher has to end by itself after the ranks lost a host, or made no progress.
_LOST_SECONDS = 2.0
_STALL_SECONDS = 15.0


class Request(NamedTuple):
    """The exact content of a start: files to write, variables for the environment, the command."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    # Whether SIGUSR1 and SIGUSR2 to the command reach the ranks.
    tells_ranks: bool = True
    # Whether SIGUSR1 to the command ends the job, as for a part of a run that is requested to stop.
    notice_ends: bool = False
    # How the ranks are requested to save and stop; None: they have nothing to save.
    stop: Stop | None = None
    # A folder that only this user can access: new for each start, removed after it.
    private: str | None = None
    # (file, seconds): once the file exists, the command is ended after so many seconds.
    given_up: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        """The shell commands that a person would type."""
        folder = f"(umask 077; mkdir -p {shlex.quote(self.private)})\n" if self.private else ""
        files = "".join(
            f"cat > {shlex.quote(path)} <<'EOF'\n{text}EOF\n" for path, text in self.files
        )
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env)
        return folder + files + env + shlex.join(self.argv)


def store_file(plan: Plan, run_dir: RunDir) -> tuple[tuple[str, str], ...]:
    """Return the file through which ranks of one host find each other, or nothing for one rank."""
    # Emptied at each start: entries of an earlier start would confuse the ranks.
    return ((str(run_dir.store), ""),) if 1 < plan.world_size == plan.nodes[0].slots else ()


def stop_of(plan: Plan, run_dir: RunDir) -> Stop | None:
    """Return how the ranks of this plan are requested to stop; None if they save nothing."""
    return (
        Stop(str(run_dir.stop_request), str(run_dir.cancelled), plan.grace_seconds)
        if plan.traits.saves
        else None
    )


def given_up_of(plan: Plan, run_dir: RunDir) -> tuple[tuple[str, float], ...]:
    """Return the files that record a lost host or a stall, with the launcher's remaining seconds.

    Without such a limit, the launcher of several hosts may wait for ever for a host that is gone.
    """
    return (
        ((str(run_dir.lost), _LOST_SECONDS), (str(run_dir.stall), _STALL_SECONDS))
        if len(plan.nodes) > 1
        else ()
    )


class JobState(Enum):
    """The state of a job."""

    # Queued, or its command prepares: no rank has been started.
    PENDING = "pending"
    RUNNING = "running"
    # It saved after a stop request: run it again.
    PREEMPTED = "preempted"
    # A person or a signal requested its end.
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @classmethod
    def of_status(cls, status: int) -> JobState:
        """Return the state of a run that ended by itself with this exit status."""
        return cls.PREEMPTED if status == EXIT_SAVED else cls.FAILED if status else cls.SUCCEEDED

    @property
    def is_end(self) -> bool:
        """Whether the job has ended."""
        return self not in (JobState.PENDING, JobState.RUNNING)


class Backend(Protocol):
    """A module with these functions.

    A job is the result of `submit`, or the JobRecord of a job of another process.
    """

    def check(self, nodes: Sequence[Node], run_dir: RunDir) -> None:
        """Check that the backend can start ranks there, before anything is measured or written.

        Raises:
            PlanError, MissingDependency: it cannot start them.
        """

    def request(self, plan: Plan, run_dir: RunDir) -> Request:
        """Return the request for this plan, without side effects."""

    def submit(self, request: Request, output: Path | None = None) -> Any:
        """Start the request and return the job.

        The job's `signal` is set if the user stops it with one.

        Args:
            output: a file for the job's output, instead of this process's own output.
        """

    def state(self, job: object) -> JobState:
        """Return the state of the job."""

    def wait(self, job: Any) -> int:
        """Wait for the end of the job and return its exit status."""

    def cancel(self, job: object) -> None:
        """End the job and every process that it started; return when they have ended.

        Raises:
            PermissionError: the job belongs to another user.
        """


def backend(name: str) -> Backend:
    """Return the backend of this launcher."""
    return cast(Backend, import_module(LAUNCHERS[name].module))

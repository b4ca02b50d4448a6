"""Plan -> running processes. Each backend builds its Request purely; only `submit`, `state` and `cancel` act.

Backends are named by string and loaded on use, so that an absent one costs nothing. May import plan's types,
run.folder and errors; never the recipe or the worker.
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

_LOST_SECONDS = 2.0
_STALL_SECONDS = 15.0


class Request(NamedTuple):
    """What will be sent, exactly: files to write, variables to add to the environment, the command."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    tells_ranks: bool = True  # SIGUSR1 and SIGUSR2 to the command reach the ranks
    notice_ends: bool = (
        False  # SIGUSR1 to the command ends all, for it is a part of what is asked to stop
    )
    stop: Stop | None = (
        None  # how the ranks are asked to save and stop; None: they have nothing to save
    )
    private: str | None = (
        None  # a folder that is this user's alone, new for each start and removed after it
    )
    given_up: tuple[
        tuple[str, float], ...
    ] = ()  # file, seconds: once it exists, the command is ended after so long

    def __str__(self) -> str:
        """What a person would type."""
        folder = f"(umask 077; mkdir -p {shlex.quote(self.private)})\n" if self.private else ""
        files = "".join(
            f"cat > {shlex.quote(path)} <<'EOF'\n{text}EOF\n" for path, text in self.files
        )
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env)
        return folder + files + env + shlex.join(self.argv)


def store_file(plan: Plan, run_dir: RunDir) -> tuple[tuple[str, str], ...]:
    """The file in which ranks of one host meet, empty: what an earlier start left would confuse them."""
    return ((str(run_dir.store), ""),) if 1 < plan.world_size == plan.nodes[0].slots else ()


def stop_of(plan: Plan, run_dir: RunDir) -> Stop | None:
    """How this plan's ranks are asked to stop."""
    return (
        Stop(str(run_dir.stop_request), str(run_dir.cancelled), plan.grace_seconds)
        if plan.traits.saves
        else None
    )


def given_up_of(plan: Plan, run_dir: RunDir) -> tuple[tuple[str, float], ...]:
    """Verdicts of the ranks of several hosts after which a launcher may wait for ever for a host that is gone."""
    return (
        ((str(run_dir.lost), _LOST_SECONDS), (str(run_dir.stall), _STALL_SECONDS))
        if len(plan.nodes) > 1
        else ()
    )


class JobState(Enum):
    """Where a job is in its life."""

    PENDING = "pending"  # queued, or its command prepares: no rank has been started
    RUNNING = "running"
    PREEMPTED = "preempted"  # it was asked to stop, and saved: run it again
    CANCELLED = "cancelled"  # a person or a signal asked for its end
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @classmethod
    def of_status(cls, status: int) -> JobState:
        """How a run has ended that left with this status by itself."""
        return cls.PREEMPTED if status == EXIT_SAVED else cls.FAILED if status else cls.SUCCEEDED

    @property
    def is_end(self) -> bool:
        """Whether nothing more comes."""
        return self not in (JobState.PENDING, JobState.RUNNING)


class Backend(Protocol):
    """A module with these functions; a job is what `submit` returned, or the JobRecord of one of another process."""

    def check(self, nodes: Sequence[Node], run_dir: RunDir) -> None:
        """Find what would keep it from starting ranks there, before anything is chosen by trying or written.

        Raises:
            PlanError, MissingDependency: it cannot.
        """

    def request(self, plan: Plan, run_dir: RunDir) -> Request:
        """What to send for this plan; pure."""

    def submit(self, request: Request, output: Path | None = None) -> Any:
        """Send it; returns the job, whose `signal` becomes the one that the user stopped it with.

        output: a file for what the job says, in place of this process's own output.
        """

    def state(self, job: object) -> JobState:
        """Where the job is."""

    def wait(self, job: Any) -> int:
        """Wait for its end; the exit status."""

    def cancel(self, job: object) -> None:
        """End it and everything it started; returns when it has ended.

        Raises:
            PermissionError: it is another user's.
        """


def backend(name: str) -> Backend:
    """The backend of a launcher's name."""
    return cast(Backend, import_module(LAUNCHERS[name].module))

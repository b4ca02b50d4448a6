"""Start the processes of a plan.

A backend builds a request, which has no side effects; processes.py starts and ends the job of any
request. A backend is a module path in LAUNCHERS, imported on first use. An unused one costs nothing.
This package never imports the recipe or the worker.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from ortlaunch.launch.stop import StopRequest
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.tables.launchers import LAUNCHERS

# Seconds in which all ranks must have begun: on one host under mpirun, and elsewhere. torchrun loads
# torch before it starts them.
_MPI_START_SECONDS = 60.0
_START_SECONDS = 300.0


class LaunchLimits(NamedTuple):
    """The run of a launcher, by which processes.py limits how long the launcher may take."""

    folder: str
    ranks: int
    hosts: int
    start_seconds: float


class LaunchRequest(NamedTuple):
    """Everything needed to start: command, environment, files, how to signal and stop the ranks."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    # Whether the command forwards SIGUSR1 and SIGUSR2 to the ranks. If not, its children get them
    # directly.
    notifies_ranks: bool = True
    # Whether SIGUSR1 ends the job even without `stop`. Used for trials and the doctor.
    notice_ends: bool = False
    # How the ranks are requested to save and stop; None: they have nothing to save.
    stop: StopRequest | None = None
    # A folder that only this user can access: new for each start, removed after it.
    private_folder: str | None = None
    # None: the command itself is the rank.
    limits: LaunchLimits | None = None

    def __str__(self) -> str:
        """The shell commands that a person would type."""
        folder = (
            f"(umask 077; mkdir -p {shlex.quote(self.private_folder)})\n"
            if self.private_folder
            else ""
        )
        files = "".join(
            f"cat > {shlex.quote(path)} <<'EOF'\n{text}EOF\n" for path, text in self.files
        )
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env)
        return folder + files + env + shlex.join(self.argv)

    def write_files(self) -> None:
        """Write the files, before the command starts."""
        for path, text in self.files:
            write_text_atomically(Path(path), text)


def stop_request_if_plan_saves(plan: Plan, run_dir: RunDir) -> StopRequest | None:
    """Return how the ranks of this plan are requested to stop; None if they save nothing."""
    return (
        StopRequest(str(run_dir.stop_request), str(run_dir.cancelled), plan.grace_seconds)
        if plan.traits.saves
        else None
    )


def launch_limits(plan: Plan, run_dir: RunDir) -> LaunchLimits:
    """Return the limits of the launcher of this plan."""
    hosts = len(plan.nodes)
    fast = plan.launcher == "mpi" and hosts == 1
    seconds = _MPI_START_SECONDS if fast else _START_SECONDS
    return LaunchLimits(str(run_dir), plan.world_size, hosts, seconds)


class JobState(Enum):
    """The state of a job."""

    # Queued, or still preparing. No rank has started.
    PENDING = "pending"
    RUNNING = "running"
    # It saved after a stop request: run it again.
    PREEMPTED = "preempted"
    # A person or a signal requested its end.
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @classmethod
    def state_of_exit_status(cls, status: int) -> JobState:
        """Return the state of a run that ended by itself with this exit status."""
        return cls.PREEMPTED if status == EXIT_SAVED else cls.FAILED if status else cls.SUCCEEDED

    @property
    def is_end(self) -> bool:
        """Whether the job has ended."""
        return self not in (JobState.PENDING, JobState.RUNNING)


class Backend(Protocol):
    """A module with these functions; processes.py starts and ends what they request."""

    def require_launchable_hosts(self, nodes: Sequence[Node], run_dir: RunDir) -> None:
        """Check that the backend can start ranks there, before anything is measured or written.

        Raises:
            PlanError, MissingDependency: it cannot start them.
        """

    def launch_request_of_plan(self, plan: Plan, run_dir: RunDir) -> LaunchRequest:
        """Return the request for this plan, without side effects."""


def load_backend(name: str) -> Backend:
    """Return the backend of this launcher."""
    return cast(Backend, import_module(LAUNCHERS[name].module))

"""Plan -> a job in a queue, whose record outlives the command. `request` is pure; `submit`, `state` and `cancel` act.

Schedulers are named by string and loaded on use. May import plan's types, launch's Request and JobState, run.folder and
errors; never the recipe, whose section `submit` comes as plain values.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from ortlaunch.errors import LaunchError, MissingDependency
from ortlaunch.launch import JobState, Request
from ortlaunch.plan import Plan
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted


class SchedulerEntry(NamedTuple):
    """A scheduler."""

    module: str
    elsewhere: bool
    """Whether ranks write a run folder of their own, on volumes that this host may not have: then a run's folder here
    knows of its job alone, and logs come from the scheduler."""


SCHEDULERS = {
    "slurm": SchedulerEntry("ortlaunch.schedulers.slurm", False),
    "kubernetes": SchedulerEntry("ortlaunch.schedulers.kubernetes", True),
    "azureml": SchedulerEntry("ortlaunch.schedulers.azureml", True),
}


@dataclass(frozen=True)
class QueuedRun:
    """What a job is to do: its plan, the command of each rank, and where."""

    plan: Plan
    run: RunDir  # absolute
    train: tuple[str, ...]  # the command that becomes a rank
    conclude: tuple[str, ...]  # the command after them; the status of the ranks is added
    folder: str  # where the command was typed
    variables: tuple[tuple[str, str], ...]  # for all of it; no secrets
    options: Mapping[str, Any]  # the recipe's section `submit`
    recipe: str = ""  # its text
    restarts: int = 0  # `launch.max_restarts`
    secrets: tuple[
        str, ...
    ] = ()  # names of variables that ranks need, whose values are nowhere here

    @property
    def headline(self) -> str:
        """What a script or a manifest begins with, for a person who finds it."""
        return (
            f"# {counted(self.plan.world_size, 'rank')} of run {self.plan.name}; "
            f"`ortlaunch status {self.run}` says how it goes."
        )


class QueueState(NamedTuple):
    """What a queue says of a job."""

    state: JobState
    words: str
    """The scheduler's own, with its reason."""


class Scheduler(Protocol):
    """A module with these functions; a job is named by its id."""

    def request(self, job: QueuedRun) -> Request:
        """What to send; pure."""

    def submit(self, request: Request) -> str:
        """Write its files and queue it; returns the id.

        Raises:
            MissingDependency: its commands are not here.
            LaunchError: it was refused, with the scheduler's words.
        """

    def state(self, job: str) -> QueueState | None:
        """Where it is; None: it is not known any more."""

    def cancel(self, job: str) -> None:
        """Ask for its end.

        Raises:
            LaunchError: it was refused.
        """

    def logs(self, job: str, follow: bool) -> tuple[str, ...]:
        """The command that prints what rank 0's node says, of a scheduler whose ranks write elsewhere."""


def scheduler(name: str) -> Scheduler:
    """The scheduler of this name."""
    return cast(Scheduler, import_module(SCHEDULERS[name].module))


def yaml_text(*documents: Mapping[str, object]) -> str:
    """Manifests as a person would write them: in order, texts of several lines as such."""
    import yaml  # here: Slurm does without

    class Dumper(yaml.SafeDumper):
        """With texts of several lines."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
        )

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1 << 20)


def ask(*argv: str, what: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command.

    Raises:
        MissingDependency: it is not here.
        LaunchError: it does not answer.
    """
    if shutil.which(argv[0]) is None:
        raise MissingDependency(f"no {argv[0]} here: {what}; --dry-run prints the job anywhere")
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} does not answer within {seconds:.0f} s; is its server up?"
        ) from None


def wanted(*argv: str, what: str) -> str:
    """The same of a command that must succeed: its output.

    Raises:
        LaunchError: it failed, with its own words.
    """
    ended = ask(*argv, what=what)
    if ended.returncode:
        raise LaunchError(f"{' '.join(argv[:3])}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout

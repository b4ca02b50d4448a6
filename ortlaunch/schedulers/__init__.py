"""Plan -> a job in a queue, whose record outlives the command. `request` is pure; `submit`, `state` and `cancel` act.

Schedulers are named by string and loaded on use. May import plan's types, launch's Request and JobState, run.folder and
errors; never the recipe, whose section `submit` comes as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from ortlaunch.launch import JobState, Request
from ortlaunch.plan import Plan
from ortlaunch.run.folder import RunDir

SCHEDULERS = {"slurm": "ortlaunch.schedulers.slurm"}


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


class Seen(NamedTuple):
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

    def state(self, job: str) -> Seen | None:
        """Where it is; None: it is not known any more."""

    def cancel(self, job: str) -> None:
        """Ask for its end.

        Raises:
            LaunchError: it was refused.
        """


def scheduler(name: str) -> Scheduler:
    """The scheduler of this name."""
    return cast(Scheduler, import_module(SCHEDULERS[name]))

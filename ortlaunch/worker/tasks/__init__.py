"""What the ranks of a run do: `plan.task` names one of these modules, whose `run` takes the rank's Session.

A module is imported when it is named, so that a task costs the others nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlaunch.worker.session import Session

TASKS = {
    "train": "ortlaunch.worker.tasks.train",
    "parity": "ortlaunch.worker.tasks.parity",
    "evaluate": "ortlaunch.worker.tasks.evaluate",
    "bench": "ortlaunch.worker.tasks.bench",
    "fabric": "ortlaunch.worker.tasks.fabric",
    "try": "ortlaunch.worker.tasks.trial",
}


def run(session: Session) -> int:
    """Do what the plan says; the exit status."""
    return import_module(TASKS[session.plan.task]).run(session) or 0

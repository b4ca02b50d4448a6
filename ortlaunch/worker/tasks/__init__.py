"""What the ranks of a run do: a module each, which the table in `ortlaunch/tasks.py` names by `plan.task`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlaunch.worker.session import Session


def run(session: Session) -> int:
    """Do what the plan says; the exit status."""
    return import_module(session.plan.traits.module).run(session) or 0

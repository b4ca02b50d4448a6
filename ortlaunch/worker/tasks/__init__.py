"""The tasks of a run's ranks, one module each.

The table in `ortlaunch/tables/tasks.py` names the module of each `plan.task`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlaunch.worker.session import Session


def run(session: Session) -> int:
    """Run the plan's task; return the exit status."""
    return import_module(session.plan.traits.module).run(session) or 0

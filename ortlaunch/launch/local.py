"""One process on this host."""

from __future__ import annotations

from ortlaunch.launch import Request, stop_of
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.plan import Plan
from ortlaunch.run_folder.folder import RunDir

__all__ = ["cancel", "request", "state", "submit", "wait"]


def request(plan: Plan, run_dir: RunDir) -> Request:
    """The worker's own command."""
    return Request((*plan.argv, str(run_dir)), plan.env, stop=stop_of(plan, run_dir))

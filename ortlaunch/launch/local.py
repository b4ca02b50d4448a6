"""Start one process on this host."""

from __future__ import annotations

from collections.abc import Sequence

from ortlaunch.launch import LaunchRequest, stop_request_of_plan
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.run_folder.folder import RunDir

__all__ = ["cancel", "check", "request", "state", "submit", "wait"]


def check(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Accept every host: one process can always be started."""


def request(plan: Plan, run_dir: RunDir) -> LaunchRequest:
    """Return the worker's own command."""
    return LaunchRequest(
        (*plan.argv, str(run_dir)), plan.env, stop=stop_request_of_plan(plan, run_dir)
    )

"""Start one process on this host."""

from __future__ import annotations

from collections.abc import Sequence

from ortlaunch.launch import LaunchRequest, stop_request_if_plan_saves
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.run_folder.folder import RunDir


def require_launchable_hosts(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Accept every host: one process can always be started."""


def launch_request_of_plan(plan: Plan, run_dir: RunDir) -> LaunchRequest:
    """Return the worker's own command."""
    return LaunchRequest(
        (*plan.argv, str(run_dir)), plan.env, stop=stop_request_if_plan_saves(plan, run_dir)
    )

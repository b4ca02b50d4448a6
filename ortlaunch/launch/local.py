"""Start one process on this host."""

from __future__ import annotations

from collections.abc import Sequence

from ortlaunch.launch import LaunchRequest, stop_request_if_plan_saves
from ortlaunch.launch.processes import (
    end_job_and_its_processes,
    forward_signals_until_job_ends,
    job_state,
    write_files_and_start_job,
)
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.run_folder.folder import RunDir

__all__ = [
    "end_job_and_its_processes",
    "forward_signals_until_job_ends",
    "job_state",
    "launch_request_of_plan",
    "require_launchable_hosts",
    "write_files_and_start_job",
]


def require_launchable_hosts(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Accept every host: one process can always be started."""


def launch_request_of_plan(plan: Plan, run_dir: RunDir) -> LaunchRequest:
    """Return the worker's own command."""
    return LaunchRequest(
        (*plan.argv, str(run_dir)), plan.env, stop=stop_request_if_plan_saves(plan, run_dir)
    )

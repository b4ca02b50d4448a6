"""A run under the user's own launcher, in which each process is a rank already.

Rank 0 prepares the folder, then each process becomes the worker. No choice can be measured here,
because a rank cannot start jobs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ortlaunch.base import module_start
from ortlaunch.base.errors import LaunchError
from ortlaunch.base.process import wait_until_true_or_timeout
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.resolve.prepare import (
    launch_request,
    set_aside_and_write_run_files_and_print_plan_unless_restart,
)
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import RunBeginning
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.started_runs import registry

# Seconds in which rank 0 must have prepared the folder.
_JOIN_SECONDS = 120
# Longer in Kubernetes: the image of rank 0's pod may have to be pulled.
_POD_SECONDS = 1800
# In a requeued job: a node that the controller took for dead may train on. NFS frees the locks of a
# client that is gone after 90 s.
_PATIENCE_SECONDS = 600.0


def prepare_folder_and_become_rank0_worker(
    resolved: ResolvedRun,
    ready_marker_file: Path,
    run: RunDir,
    lock: RunLock,
    beginning: RunBeginning,
) -> NoReturn:
    """As rank 0, prepare the folder, mark it as prepared, and become the worker."""
    # The lock must outlast this program, which the worker replaces in the same process.
    lock.lock_and_record_holder_or_refuse(run, survives_exec=True)
    JobRecord.for_this_process_or_its_queued_job(run, "inside", JobState.RUNNING).write(run)
    registry.register_run_or_print_error(run)
    request = set_aside_and_write_run_files_and_print_plan_unless_restart(
        resolved, run, beginning.text_lines, beginning
    )
    # Last of all files: other ranks start as soon as it exists.
    write_text_atomically(ready_marker_file, "")
    _replace_process_by_worker(request)


def max_wait_seconds_for_requeued_job() -> float:
    """Return how long a turn of a job waits for an earlier turn, whose node may train on."""
    return _PATIENCE_SECONDS if os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0") else 0.0


def wait_for_rank0_and_become_worker(ready_marker_file: Path, run: RunDir) -> NoReturn:
    """As another rank, wait until rank 0 has prepared the folder, and become a worker of its plan.

    Raises:
        LaunchError: rank 0 did not prepare it in time.
    """
    limit_seconds = (
        _POD_SECONDS
        if os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:")
        else _JOIN_SECONDS + max_wait_seconds_for_requeued_job()
    )
    if not wait_until_true_or_timeout(ready_marker_file.exists, limit_seconds):
        raise LaunchError(
            f"rank 0 did not prepare {run} within {limit_seconds:g} s; "
            "is it on a disk that all hosts share?"
        )
    # The program is this host's: other hosts may have it in another folder.
    plan = replace(Plan.read(run.plan), argv=module_start.module_command("ortlaunch.worker"))
    _replace_process_by_worker(launch_request(plan, run))


def _replace_process_by_worker(request: LaunchRequest) -> NoReturn:
    os.execve(request.argv[0], request.argv, {**os.environ, **dict(request.env)})

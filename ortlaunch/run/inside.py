"""A run under a launcher of the user's own: each process is a rank already.

Rank 0 prepares the folder, then each becomes the worker. Nothing can be tried here, for that takes jobs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, Request
from ortlaunch.launch.record import JobRecord
from ortlaunch.output import print_lines
from ortlaunch.rank import JOB_VARIABLE, Rank
from ortlaunch.resolve import resume
from ortlaunch.resolve.prepare import launch_id, request_of
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import choices
from ortlaunch.run.preparation import check, finished, leave_finished, prepare
from ortlaunch.run_folder.folder import RunDir, write_text
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.runs import registry

_JOIN_SECONDS, _POD_SECONDS = 120, 1800  # a pod's image may have to be pulled


def train(resolved: ResolvedRun, rank: Rank, run: RunDir, lock: RunLock, options: ResumeOptions) -> int:
    """Become a rank of the run; returns where nothing is left to do.

    Raises:
        PlanError: a choice is open.
        LaunchError: rank 0 has not prepared the folder.
    """
    mark = run.ready / (launch_id(rank, os.environ) or "launch")
    resolved = choices.known(resolved, run)
    done = finished(resolved, run, options)
    if rank.rank == 0:
        mark.unlink(missing_ok=True)
        beginning = check(resolved, run, options)
        if done:
            return leave_finished(resolved, run, beginning.lines, done)
        print_lines(beginning.lines)
        lock.take(run, keep=True)
        JobRecord.begun(run, "inside", JobState.RUNNING).write(run)
        registry.add(run)
        resume.apply(run, beginning, options)
        prepare(resolved, run)
        for path, text in request_of(resolved.plan, run).files:
            write_text(Path(path), text)
        write_text(mark, "")
    elif done:
        return 0
    _wait_for(mark, run)
    return _become_worker(request_of(resolved.plan, run))


def _become_worker(request: Request) -> NoReturn:
    os.execve(request.argv[0], request.argv, {**os.environ, **dict(request.env)})


def _wait_for(mark: Path, run: RunDir) -> None:
    """Wait until rank 0 has prepared the folder."""
    seconds = _POD_SECONDS if os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:") else _JOIN_SECONDS
    deadline = time.monotonic() + seconds
    while not mark.exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"rank 0 did not prepare {run} within {seconds} s; is it on a disk that all hosts share?")
        time.sleep(0.05)

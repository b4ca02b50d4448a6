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
from ortlaunch.rank import JOB_VARIABLE, Rank
from ortlaunch.resolve import resume
from ortlaunch.resolve.prepare import launch_id, request_of
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import Beginning, ResumeOptions
from ortlaunch.run.preparation import prepare, print_lines
from ortlaunch.run_folder.folder import RunDir, write_text
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.runs import registry

# a pod's image may have to be pulled
_JOIN_SECONDS = 120
_POD_SECONDS = 1800


def mark_of(run: RunDir, rank: Rank) -> Path:
    """The file by which rank 0 says that the folder is prepared."""
    return run.ready / (launch_id(rank, os.environ) or "launch")


def lead(
    resolved: ResolvedRun,
    rank: Rank,
    run: RunDir,
    lock: RunLock,
    beginning: Beginning,
    options: ResumeOptions,
) -> NoReturn:
    """Rank 0: prepare the folder, say so, become the worker."""
    print_lines(beginning.lines)
    lock.take(run, keep=True)
    JobRecord.begun(run, "inside", JobState.RUNNING).write(run)
    registry.add(run)
    resume.apply(run, beginning, options)
    request = prepare(resolved, run)
    for path, text in request.files:
        write_text(Path(path), text)
    write_text(mark_of(run, rank), "")
    _become_worker(request)


def follow(resolved: ResolvedRun, rank: Rank, run: RunDir) -> NoReturn:
    """Another rank: wait until rank 0 has prepared the folder, become the worker.

    Raises:
        LaunchError: it has not.
    """
    mark = mark_of(run, rank)
    seconds = _JOIN_SECONDS
    if os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:"):
        seconds = _POD_SECONDS
    deadline = time.monotonic() + seconds
    while not mark.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank 0 did not prepare {run} within {seconds} s; is it on a disk that all hosts share?"
            )
        time.sleep(0.05)
    _become_worker(request_of(resolved.plan, run))


def _become_worker(request: Request) -> NoReturn:
    os.execve(request.argv[0], request.argv, {**os.environ, **dict(request.env)})

"""What a run says: a rank's output, or a queued job's own, printed and followed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ortlaunch.errors import InputError, MissingDependency
from ortlaunch.launch.record import JobRecord
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.runs.queued import is_queued
from ortlaunch.runs.status import look
from ortlaunch.schedulers import SCHEDULERS, scheduler

_POLL_SECONDS = 0.5
_LOOK_SECONDS = 3.0  # a queue is asked less often


def show(run: RunDir, rank: int, follow: bool) -> int:
    """Print a rank's output and, for rank 0 of a job in a queue, what its script and the scheduler said.

    Args:
        follow: go on until the run has ended.

    Returns:
        0, or the run's exit status where its end was followed.

    Raises:
        InputError: it is no run folder, or has no such rank.
    """
    status = look(run)
    if status.ranks is not None and rank >= status.ranks:
        raise InputError(f"--rank is {rank}, and {run} has ranks 0 to {status.ranks - 1}")
    queued = is_queued(status.job)
    if queued and SCHEDULERS[status.job.backend].elsewhere:
        if not run.plan.exists():
            return _of_scheduler(status.job, rank, follow)
        queued = False  # their folder is here all the same
    read = dict[Path, int]()
    next_look = 0.0
    while True:
        ended = status.state.is_end
        _print_new(_files(run, rank, queued), read)
        if ended or not follow:
            return (status.job.exit_status or 0) if follow else 0
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > next_look:
            status = look(run)
            next_look = time.monotonic() + _LOOK_SECONDS


def _of_scheduler(job: JobRecord, rank: int, follow: bool) -> int:
    """Ranks write their logs where this host does not see them."""
    if rank:
        raise InputError(
            f"--rank is {rank}, and {job.backend} shows rank 0's node alone; logs/ of the pods' run folder has all"
        )
    argv = scheduler(job.backend).logs(job.id, follow)
    if shutil.which(argv[0]) is None:
        raise MissingDependency(f"no {argv[0]} here: ask where it is")
    return subprocess.run(argv, check=False).returncode


def _files(run: RunDir, rank: int, queued: bool) -> list[Path]:
    """A job's own output holds rank 0's."""
    if queued and rank == 0:
        return sorted(run.logs.glob("slurm-*.out"))
    return [path for path in (run.log(rank, "out"), run.log(rank, "err")) if path.exists()]


def _print_new(files: Iterable[Path], read: dict[Path, int]) -> None:
    for path in files:
        with open(path, "rb") as file:
            file.seek(read.get(path, 0))
            text = file.read()
        read[path] = read.get(path, 0) + len(text)
        if text:
            sys.stdout.write(text.decode("utf-8", "replace"))
            sys.stdout.flush()

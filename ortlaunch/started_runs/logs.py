"""Read and follow the output of a run's rank, or of a queued job."""

from __future__ import annotations

import codecs
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ortlaunch.base.errors import InputError, MissingDependency, RunError
from ortlaunch.base.json_types import open_regular_file_or_refuse
from ortlaunch.launch.record import JobRecord
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.schedulers import SCHEDULERS, load_scheduler
from ortlaunch.started_runs.queued import is_queued
from ortlaunch.started_runs.status import read_status

_POLL_SECONDS = 0.5
# The status is read less often than the files, because it may query a scheduler.
_STATUS_SECONDS = 3.0


def iterate_rank_output_text(run: RunDir, rank: int, follows_until_end: bool) -> Iterator[str]:
    """Yield a rank's output as it is written.

    For rank 0 of a queued job it is the output of the job: of its batch script and of rank 0.

    Args:
        follows_until_end: continue until the run has ended.

    Raises:
        InputError: the folder is not a run folder, or the rank does not exist.
        MissingDependency: this host does not have the scheduler's command.
        RunError: the scheduler's command failed.
    """
    status = read_status(run)
    if status.ranks is not None and rank >= status.ranks:
        raise InputError(f"--rank is {rank}, and {run} has ranks 0 to {status.ranks - 1}")
    is_in_queue = is_queued(status.job)
    if is_in_queue and SCHEDULERS[status.job.backend].is_elsewhere:
        if not run.plan.exists():
            yield from _iterate_first_node_log_of_scheduler_command(
                status.job, rank, follows_until_end
            )
            return
        # The ranks' run folder is on a volume that this host can read, so their logs are read there.
        is_in_queue = False
    position_by_path = dict[Path, _ReadPosition]()
    next_status = 0.0
    while True:
        has_ended = status.state.is_end
        yield from _read_appended_text_and_advance_positions(
            _output_files_of_rank_or_job(run, rank, is_in_queue), position_by_path
        )
        if has_ended or not follows_until_end:
            return
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > next_status:
            status = read_status(run)
            next_status = time.monotonic() + _STATUS_SECONDS


def _iterate_first_node_log_of_scheduler_command(
    job: JobRecord, rank: int, follows_until_end: bool
) -> Iterator[str]:
    """Yield the scheduler's logs of a job whose run folder this host cannot read."""
    if rank:
        raise InputError(
            f"--rank is {rank}, and {job.backend} shows only rank 0's node; logs/ in the "
            "pods' run folder has the logs of all ranks"
        )
    argv = load_scheduler(job.backend).log_command_of_first_node(job.id, follows_until_end)
    if shutil.which(argv[0]) is None:
        raise MissingDependency(f"{argv[0]} not found here: use a host that has it")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        yield from command.stdout
    if command.returncode:
        raise RunError(f"{' '.join(argv)}: exit status {command.returncode}", command.returncode)


def _output_files_of_rank_or_job(run: RunDir, rank: int, is_in_queue: bool) -> list[Path]:
    # In a Slurm job the batch script and rank 0 write to the same file.
    if is_in_queue and rank == 0:
        return sorted(run.logs.glob("slurm-*.out"))
    return [
        path
        for path in (run.rank_log_path(rank, "out"), run.rank_log_path(rank, "err"))
        if path.exists()
    ]


class _ReadPosition:
    """The end of the part of a file that has been read."""

    def __init__(self) -> None:
        self.offset = 0
        # It keeps the first bytes of a character of which the rank has not written the rest yet.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


def _read_appended_text_and_advance_positions(
    output_paths: Iterable[Path], position_by_path: dict[Path, _ReadPosition]
) -> Iterator[str]:
    for path in output_paths:
        position = position_by_path.setdefault(path, _ReadPosition())
        # Offsets count bytes, so the file is read as bytes.
        with open_regular_file_or_refuse(path) as file:
            file.seek(position.offset)
            new_bytes = file.read()
        position.offset += len(new_bytes)
        if new_bytes:
            yield position.decoder.decode(new_bytes)

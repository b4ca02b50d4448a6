"""A run whose job a scheduler has: what its queue says and what its folder tells, put together."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from datetime import datetime

from ortlaunch.cause import Cause, Failure
from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState
from ortlaunch.launch.failure import End, explain_end
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.schedulers import SCHEDULERS, QueueState, scheduler

_LAST = (
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
)  # a job that was preempted may be queued again
_END_SECONDS = 120  # KillWait is 30 s as Slurm comes, and what is running then has to be reaped
_POLL_SECONDS = 1.0


def is_queued(job: JobRecord) -> bool:
    """Whether a scheduler has it."""
    return job.backend in SCHEDULERS


def found(run: RunDir, job: JobRecord) -> JobRecord:
    """The record with the state that the queue tells, and a verdict where nobody could leave one."""
    if job.state in _LAST:
        return job
    seen = scheduler(job.backend).state(job.id)
    if seen is None:
        return job if job.state.is_end else _ended(run, job, None)
    if not seen.state.is_end:
        return replace(job, state=seen.state, ended=None, exit_status=None, verdict=_waiting(seen))
    written = JobRecord.read(run)  # its script may have said how it ended between two looks
    if written is not None and written.id == job.id and written.state.is_end:
        cancelled_later = written.state is JobState.PREEMPTED and seen.state is JobState.CANCELLED
        return _ended(run, job, seen) if cancelled_later else written
    return _ended(run, job, seen)


def is_prepared(run: RunDir) -> bool:
    """Whether rank 0 of this turn of the job wrote the folder: its script is touched when a turn begins."""
    if not (run.plan.exists() and run.request.exists()):
        return False
    return (
        not run.job_script.exists()
        or run.request.stat().st_mtime_ns >= run.job_script.stat().st_mtime_ns
    )


def cancel(run: RunDir, job: JobRecord) -> JobRecord:
    """End it, and return its record once the queue has let it go.

    Raises:
        LaunchError: it was refused, or takes longer than the scheduler gives it.
    """
    scheduler(job.backend).cancel(job.id)
    deadline = time.monotonic() + _END_SECONDS
    while (seen := scheduler(job.backend).state(job.id)) is not None and not seen.state.is_end:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{run}: job {job.id} of {job.backend} is still {seen.words} after {_END_SECONDS} s"
            )
        time.sleep(_POLL_SECONDS)
    if seen is None and SCHEDULERS[job.backend].elsewhere:  # it was deleted
        job.at_end(JobState.CANCELLED, 1, "ortlaunch: cancelled").write(run)
    return found(run, JobRecord.read(run) or job)


def _waiting(seen: QueueState) -> str | None:
    return f"queued: {seen.words}" if seen.state is JobState.PENDING else None


def _ended(run: RunDir, job: JobRecord, seen: QueueState | None) -> JobRecord:
    """A job whose script was ended with it: by a person, a time limit, a node that failed; it is recorded."""
    if SCHEDULERS[job.backend].elsewhere and not run.plan.exists():
        return _ended_elsewhere(run, job, seen)
    end = _end_of_folder(run, job)
    state, words = seen or QueueState(
        JobState.SUCCEEDED if end.status == 0 else JobState.FAILED, "no job that it knows"
    )
    if state is JobState.SUCCEEDED:
        state = JobState.FAILED if end.status else JobState.SUCCEEDED
    cancelled = (
        state is JobState.CANCELLED and end.status == EXIT_SAVED
    )  # which would mean: run me again
    status = (
        128 + signal.SIGTERM
        if cancelled
        else end.status or (0 if state is JobState.SUCCEEDED else 1)
    )
    record = job.at_end(state, status, f"{job.backend} says: {words}\n{end.text}", end.failure)
    record.write(run)
    return record


def _ended_elsewhere(run: RunDir, job: JobRecord, seen: QueueState | None) -> JobRecord:
    """Ranks wrote their folder where this host does not see it."""
    state, words = seen or QueueState(
        JobState.FAILED, "no job that it knows, so how it ended is not known"
    )
    status = {JobState.SUCCEEDED: 0, JobState.PREEMPTED: EXIT_SAVED}.get(state, 1)
    verdict = f"{job.backend} says: {words}"
    record = job.at_end(state, status, verdict, Failure(Cause.UNKNOWN, verdict) if status else None)
    record.write(run)
    return record


def _end_of_folder(run: RunDir, job: JobRecord) -> End:
    """What the ranks left."""
    trained = (
        run.summary.exists()
        and run.summary.stat().st_mtime >= datetime.fromisoformat(job.started).timestamp()
    )
    if trained:
        return End(0, f"done: {run}")
    if not is_prepared(run):
        return End.of(
            1, Failure(Cause.UNKNOWN, f"no rank had begun; {run.logs} has the job's output")
        )
    return explain_end(run, 1)

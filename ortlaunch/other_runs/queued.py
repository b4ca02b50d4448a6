"""The state of a run in a scheduler's queue, from the queue and from the run folder together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from ortlaunch.cause import Cause, Failure
from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState
from ortlaunch.launch.failure import RunEnd, classify_run_end
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir, read_own_text
from ortlaunch.schedulers import SCHEDULERS, QueueState, scheduler

# A preempted job is not among them: the scheduler may queue it again.
_LAST = (
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
)
# Returns the state of a job in its queue; None if the queue does not know it.
Queue = Callable[[JobRecord], QueueState | None]
# Slurm's default KillWait is 30 s, and the processes have to be reaped after that.
_END_SECONDS = 120
_POLL_SECONDS = 1.0


def is_queued(job: JobRecord) -> bool:
    """Whether the job belongs to a scheduler."""
    return job.backend in SCHEDULERS


def ask(job: JobRecord) -> QueueState | None:
    """Return the state of one job in its queue; None if the queue does not know it."""
    return scheduler(job.backend).state(job.id)


class SharedQueue:
    """The queue's answers for many runs: one question for all, and none after a failure.

    A controller that is away answers each question after some 20 s.
    """

    def __init__(self) -> None:
        """Ask nothing yet."""
        self._states: dict[str, dict[str, QueueState]] = {}
        self._failures: dict[str, LaunchError] = {}

    def __call__(self, job: JobRecord) -> QueueState | None:
        """Return the state of a job, as `ask` does.

        Raises:
            LaunchError: the scheduler does not answer, or has not answered for an earlier job.
        """
        name = job.backend
        if name in self._failures:
            raise self._failures[name]
        try:
            if name not in self._states:
                self._states[name] = scheduler(name).states()
            there = self._states[name].get(job.id)
            # A run that saved, and is not in the queue, waits for its next submission.
            return there if there is not None or job.state.is_end else ask(job)
        except LaunchError as error:
            self._failures[name] = error
            raise


def found(run: RunDir, job: JobRecord, queue: Queue = ask) -> JobRecord:
    """Return the record with the queue's state, and with a verdict if none was recorded."""
    if job.state in _LAST:
        return job
    seen = queue(job)
    if seen is None:
        return job if job.state.is_end else _ended(run, job, None)
    if not seen.state.is_end:
        waits = f"queued: {seen.words}" if seen.state is JobState.PENDING else None
        return replace(job, state=seen.state, ended=None, exit_status=None, verdict=waits)
    # The job's script may have recorded the end since `job` was read.
    written = JobRecord.read(run)
    if written is not None and written.id == job.id and written.state.is_end:
        cancelled_later = written.state is JobState.PREEMPTED and seen.state is JobState.CANCELLED
        if not cancelled_later:
            return replace(written, verdict=f"{written.verdict}{_refusal(run)}")
    return _ended(run, job, seen)


def _refusal(run: RunDir) -> str:
    """Return a line on a requeue that the scheduler refused; "" if it refused none."""
    # The job's script writes the scheduler's words into the request.
    said = read_own_text(run.requeue_request).strip() if run.requeue_request.exists() else ""
    return f"\n{said}; `ortlaunch submit` with this run folder continues it" if said else ""


def is_prepared(run: RunDir) -> bool:
    """Whether rank 0 of the job's current start prepared the folder."""
    # The script is touched at the beginning of each start, so an older request is of another one.
    if not (run.plan.exists() and run.request.exists()):
        return False
    return (
        not run.job_script.exists()
        or run.request.stat().st_mtime_ns >= run.job_script.stat().st_mtime_ns
    )


def cancel(run: RunDir, job: JobRecord) -> JobRecord:
    """Cancel the job and return its record, once the job has left the queue.

    Raises:
        LaunchError: the scheduler refused, or the job takes longer than the scheduler allows.
    """
    scheduler(job.backend).cancel(job.id)
    deadline = time.monotonic() + _END_SECONDS
    while (seen := scheduler(job.backend).state(job.id)) is not None and not seen.state.is_end:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{run}: job {job.id} of {job.backend} is still {seen.words} after {_END_SECONDS} s"
            )
        time.sleep(_POLL_SECONDS)
    # A job without a state was deleted; its folder is not on this host and gives no other state.
    if seen is None and SCHEDULERS[job.backend].elsewhere:
        job.ended_record(JobState.CANCELLED, 1, "ortlaunch: cancelled").write(run)
    return found(run, JobRecord.read(run) or job)


def _ended(run: RunDir, job: JobRecord, seen: QueueState | None) -> JobRecord:
    """Record the end of a job whose script was ended together with it.

    Causes are a person, a time limit, or a node that failed.
    """
    if SCHEDULERS[job.backend].elsewhere and not run.plan.exists():
        return _ended_elsewhere(run, job, seen)
    end = _end_of_folder(run, job)
    # The queue may have forgotten the job; the run folder then decides on its state.
    state, words = seen or QueueState(
        JobState.SUCCEEDED if end.status == 0 else JobState.FAILED, "unknown to the scheduler"
    )
    if state is JobState.SUCCEEDED:
        state = JobState.FAILED if end.status else JobState.SUCCEEDED
    # EXIT_SAVED requests another start, which a cancelled job must not get.
    cancelled = state is JobState.CANCELLED and end.status == EXIT_SAVED
    status = (
        128 + signal.SIGTERM
        if cancelled
        else end.status or (0 if state is JobState.SUCCEEDED else 1)
    )
    verdict = f"{job.backend} says: {words}\n{end.text}{_refusal(run)}"
    record = job.ended_record(state, status, verdict, end.failure)
    record.write(run)
    return record


def _ended_elsewhere(run: RunDir, job: JobRecord, seen: QueueState | None) -> JobRecord:
    """Record the end of a job whose ranks wrote a run folder that this host cannot read."""
    state, words = seen or QueueState(
        JobState.FAILED, "unknown to the scheduler, so its end is unknown"
    )
    # The exit status of such a job is unknown here: 1 stands for every failure.
    status = {JobState.SUCCEEDED: 0, JobState.PREEMPTED: EXIT_SAVED}.get(state, 1)
    verdict = f"{job.backend} says: {words}"
    record = job.ended_record(
        state, status, verdict, Failure(Cause.UNKNOWN, verdict) if status else None
    )
    record.write(run)
    return record


def _end_of_folder(run: RunDir, job: JobRecord) -> RunEnd:
    """Return the end that the ranks recorded in the run folder."""
    # A summary from before this job belongs to an earlier one.
    trained = (
        run.summary.exists()
        and run.summary.stat().st_mtime >= datetime.fromisoformat(job.started).timestamp()
    )
    if trained:
        return RunEnd(0, f"done: {run}")
    if not is_prepared(run):
        return RunEnd.from_failure(
            1, Failure(Cause.UNKNOWN, f"no rank had started; {run.logs} has the job's output")
        )
    return classify_run_end(run, 1)

"""The state of a run in a scheduler's queue, from the queue and from the run folder together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import LaunchError
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir, read_text_or_raise_damaged
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.schedulers import SCHEDULERS, QueueState, load_scheduler

# A preempted job is not among them: the scheduler may queue it again.
_FINAL_STATES = (
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


def ask_scheduler(job: JobRecord) -> QueueState | None:
    """Return the state of one job in its queue; None if the queue does not know it."""
    return load_scheduler(job.backend).queue_state_or_none(job.id)


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
        scheduler_name = job.backend
        if scheduler_name in self._failures:
            raise self._failures[scheduler_name]
        try:
            if scheduler_name not in self._states:
                self._states[scheduler_name] = load_scheduler(
                    scheduler_name
                ).queue_state_by_id_of_user_jobs()
            queue_state = self._states[scheduler_name].get(job.id)
            # A run that saved, and is not in the queue, waits for its next submission.
            return (
                queue_state if queue_state is not None or job.state.is_end else ask_scheduler(job)
            )
        except LaunchError as error:
            self._failures[scheduler_name] = error
            raise


def job_record_by_queue_recording_unrecorded_end(
    run: RunDir, job: JobRecord, ask_queue: Queue = ask_scheduler
) -> JobRecord:
    """Return the record with the queue's state, and with a verdict if none was recorded."""
    if job.state in _FINAL_STATES:
        return job
    queue_state = ask_queue(job)
    if queue_state is None:
        return (
            job
            if job.state.is_end
            else _write_end_of_ended_job_from_queue_and_folder(run, job, None)
        )
    if not queue_state.state.is_end:
        waiting_text = (
            f"queued: {queue_state.state_text}" if queue_state.state is JobState.PENDING else None
        )
        return replace(
            job,
            state=queue_state.state,
            ended=None,
            exit_status=None,
            verdict=None,
            queue_state=waiting_text,
        )
    # The job's script may have recorded the end since `job` was read.
    recorded_job = JobRecord.read_or_none_refusing_damaged(run)
    if recorded_job is not None and recorded_job.id == job.id and recorded_job.state.is_end:
        was_cancelled_later = (
            recorded_job.state is JobState.PREEMPTED and queue_state.state is JobState.CANCELLED
        )
        if not was_cancelled_later:
            return replace(
                recorded_job,
                verdict=recorded_job.verdict and _add_refused_requeue(run, recorded_job.verdict),
            )
    return _write_end_of_ended_job_from_queue_and_folder(run, job, queue_state)


def _add_refused_requeue(run: RunDir, verdict: Verdict) -> Verdict:
    # The job's script writes the scheduler's words into the request.
    scheduler_message = (
        read_text_or_raise_damaged(run.requeue_request).strip()
        if run.requeue_request.exists()
        else ""
    )
    return (
        verdict.with_note(
            f"{scheduler_message}; `ortlaunch submit` with this run folder continues it"
        )
        if scheduler_message
        else verdict
    )


def has_rank0_prepared_run_folder(run: RunDir) -> bool:
    """Whether rank 0 of the job's current start prepared the folder."""
    # The script is touched at the beginning of each start, so an older request is of another one.
    return (
        run.plan.exists()
        and run.request.exists()
        and (
            not run.job_script.exists()
            or run.request.stat().st_mtime_ns >= run.job_script.stat().st_mtime_ns
        )
    )


def cancel_queued_job_and_wait(run: RunDir, job: JobRecord) -> JobRecord:
    """Cancel the job and return its record, once the job has left the queue.

    Raises:
        LaunchError: the scheduler refused, or the job takes longer than the scheduler allows.
    """
    load_scheduler(job.backend).request_end_of_job(job.id)
    deadline = time.monotonic() + _END_SECONDS
    while (
        queue_state := load_scheduler(job.backend).queue_state_or_none(job.id)
    ) is not None and not queue_state.state.is_end:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{run}: job {job.id} of {job.backend} is still {queue_state.state_text} after {_END_SECONDS} s"
            )
        time.sleep(_POLL_SECONDS)
    # A job without a state was deleted; its folder is not on this host and gives no other state.
    if queue_state is None and SCHEDULERS[job.backend].is_elsewhere:
        job.copy_ended_now(JobState.CANCELLED, Verdict(1, "cancelled")).write(run)
    return job_record_by_queue_recording_unrecorded_end(
        run, JobRecord.read_or_none_refusing_damaged(run) or job
    )


def _write_end_of_ended_job_from_queue_and_folder(
    run: RunDir, job: JobRecord, queue_state: QueueState | None
) -> JobRecord:
    """Record the end of a job whose script was ended together with it.

    Causes are a person, a time limit, or a node that failed.
    """
    if SCHEDULERS[job.backend].is_elsewhere and not run.plan.exists():
        return _write_end_of_ended_job_from_queue_alone(run, job, queue_state)
    verdict = _verdict_recorded_in_folder(run, job)
    # The queue may have forgotten the job; the run folder then decides on its state.
    job_state, state_text = queue_state or QueueState(
        JobState.SUCCEEDED if verdict.exit_status == 0 else JobState.FAILED,
        "unknown to the scheduler",
    )
    if job_state is JobState.SUCCEEDED:
        job_state = JobState.FAILED if verdict.exit_status else JobState.SUCCEEDED
    # EXIT_SAVED requests another start, which a cancelled job must not get.
    was_cancelled = job_state is JobState.CANCELLED and verdict.exit_status == EXIT_SAVED
    exit_status = (
        128 + signal.SIGTERM
        if was_cancelled
        else verdict.exit_status or (0 if job_state is JobState.SUCCEEDED else 1)
    )
    verdict = _add_refused_requeue(run, replace(verdict, exit_status=exit_status))
    record = replace(
        job.copy_ended_now(job_state, verdict), queue_state=f"{job.backend} says: {state_text}"
    )
    record.write(run)
    return record


def _write_end_of_ended_job_from_queue_alone(
    run: RunDir, job: JobRecord, queue_state: QueueState | None
) -> JobRecord:
    """Record the end of a job whose ranks wrote a run folder that this host cannot read."""
    job_state, state_text = queue_state or QueueState(
        JobState.FAILED, "unknown to the scheduler, so its end is unknown"
    )
    # The exit status of such a job is unknown here: 1 stands for every failure.
    exit_status = {JobState.SUCCEEDED: 0, JobState.PREEMPTED: EXIT_SAVED}.get(job_state, 1)
    message = f"{job.backend} says: {state_text}"
    verdict = (
        Verdict.of_failure_detected_by_command(exit_status, Failure(Cause.UNKNOWN, message))
        if exit_status
        else Verdict(0, message)
    )
    record = job.copy_ended_now(job_state, verdict)
    record.write(run)
    return record


def _verdict_recorded_in_folder(run: RunDir, job: JobRecord) -> Verdict:
    if job.has_completed_training(run):
        return Verdict(0, f"done: {run}")
    if not has_rank0_prepared_run_folder(run):
        return Verdict.of_failure_detected_by_command(
            1, Failure(Cause.UNKNOWN, f"no rank had started; {run.logs} has the job's output")
        )
    return conclude_run(run, 1)

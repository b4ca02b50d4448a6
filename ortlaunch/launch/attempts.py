"""Failed starts of the ranks: their records and their logs. restart_policy.py judges them."""

from __future__ import annotations

from ortlaunch.launch.record import Attempt
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import NO_FAULT
from ortlaunch.run_folder.error_record import (
    ErrorRecord,
    first_error_record,
    ranks_whose_supervisor_started,
)
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.verdict import Verdict


def record_of_failed_attempt_with_last_step(
    run: RunDir,
    verdict: Verdict,
    attempt_number: int,
    attempt_seconds: float,
    checkpoint_at_start: int,
) -> Attempt:
    """Return the record of an attempt that failed.

    Args:
        attempt_seconds: duration of the attempt.
        checkpoint_at_start: step of the newest complete checkpoint at its start; 0 if there was none.
    """
    first_record = first_error_record(run)
    has_begun = bool(ranks_whose_supervisor_started(run))
    return Attempt(
        number=attempt_number,
        seconds=round(attempt_seconds, 1),
        exit_status=verdict.exit_status,
        cause=verdict.cause,
        message=verdict.message.partition("\n")[0],
        failure=_exception_or_exit_status_text(first_record, verdict),
        step=None if not has_begun or first_record is None else first_record.step,
        checkpoint=run.newest_checkpoint_step_or_zero(),
        resumed=checkpoint_at_start,
    )


def _exception_or_exit_status_text(
    first_error_record_or_none: ErrorRecord | None, verdict: Verdict
) -> str:
    """Return the text that is compared between attempts: the exception, or the exit status."""
    if (
        first_error_record_or_none is None
        or first_error_record_or_none.secondary
        or first_error_record_or_none.is_seen_by_supervisor_only
    ):
        return f"exit status {verdict.exit_status}"
    message = first_error_record_or_none.message.strip().splitlines()
    return (
        f"{first_error_record_or_none.type}: {message[0][:200]}"
        if message
        else first_error_record_or_none.type
    )


def failed_attempt_unless_good_stopped_or_restarted(
    run: RunDir,
    verdict: Verdict,
    attempt_number: int,
    attempt_seconds: float,
    rank0_prepared_folder: bool,
) -> Attempt | None:
    """Return the record of a scheduler's job that failed.

    None if its end is no fault, or if its command restarts the ranks itself.

    Args:
        rank0_prepared_folder: whether rank 0 of this job prepared the run folder.
    """
    command_restarts_ranks = rank0_prepared_folder and Plan.read(run.plan).started_by.is_ours
    if (
        verdict.exit_status == 0
        or verdict.exit_status in NO_FAULT
        or command_restarts_ranks
        or run.stop_request.exists()
    ):
        return None
    if rank0_prepared_folder:
        start_time_ns = run.request.stat().st_mtime_ns
        steps_at_start = (
            step
            for step, path in run.complete_checkpoints()
            if (path / COMPLETE).stat().st_mtime_ns < start_time_ns
        )
        return record_of_failed_attempt_with_last_step(
            run,
            verdict,
            attempt_number,
            attempt_seconds,
            max(steps_at_start, default=0),
        )
    newest_step = run.newest_checkpoint_step_or_zero()
    failure = f"exit status {verdict.exit_status}"
    return Attempt(
        attempt_number,
        round(attempt_seconds, 1),
        verdict.exit_status,
        verdict.cause,
        verdict.message,
        failure,
        None,
        newest_step,
        newest_step,
    )


def move_logs_to_new_attempt_and_return_number_or_0(run: RunDir) -> int:
    """Move the logs and errors of a failed start to attempts/N.

    Returns:
        N; 0 if no rank left a record.
    """
    if not run.errors.is_dir() or not any(run.errors.iterdir()):
        return 0
    attempt_numbers = [
        int(path.name) for path in run.attempts.glob("[0-9]*") if path.name.isdigit()
    ]
    folder = run.attempt_folder(attempt_number := max(attempt_numbers, default=0) + 1)
    (folder / run.logs.name).mkdir(parents=True)
    for log in run.logs.glob("*"):
        # Slurm writes a job's own output there, also the lines of this start.
        if not log.match("slurm-*.out"):
            log.rename(folder / run.logs.name / log.name)
    run.errors.rename(folder / run.errors.name)
    return attempt_number

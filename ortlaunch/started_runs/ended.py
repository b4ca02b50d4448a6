"""Print and record the verdict of a queued run, for its job script.

    python ortlaunch/base/module_start.py ortlaunch.started_runs.ended RUN RESTARTS STATUS BEGAN

srun's status may be that of a rank that was ended because another failed. This command returns the
first failing rank's, and writes the verdict into job.json, as `ortlaunch train` does for ranks that
it starts itself. If the run continues in another start of the job, it writes `requests/requeue`,
and the script then requeues the job.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import replace

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import JobState
from ortlaunch.launch.attempts import failed_attempt_unless_good_stopped_or_restarted
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch.restart_policy import reason_restart_is_refused, restarts_without_progress
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.error_record import first_error_record
from ortlaunch.run_folder.folder import (
    COMPLETE,
    RunDir,
    read_text_or_raise_damaged,
    write_text_atomically,
)
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.schedulers.slurm import TURN_PREFIX
from ortlaunch.started_runs.queued import has_rank0_prepared_run_folder

_FIRST_TASK = re.compile(r"task 0: Exited with exit code (\d+)")
# Slurm's words where it ends a step itself; a rank's end is another matter.
_ENDED_BY_SLURM = re.compile(r"Task launch for \S+ failed|CANCELLED AT .* DUE TO (?!TIME LIMIT)")


def record_and_print_end_and_request_requeue_if_saved() -> int:
    """Print and record the verdict, and return the run's exit status."""
    run = RunDir(sys.argv[1])
    max_restarts = int(sys.argv[2])
    exit_status = int(sys.argv[3])
    # The script touches itself when a turn begins. A node that the controller took for dead may end
    # its turn after the next one has begun.
    if run.job_script.exists() and int(run.job_script.stat().st_mtime) > int(sys.argv[4]):
        print("ortlaunch: a later turn of this job has the run", file=sys.stderr, flush=True)
        return exit_status
    verdict = _verdict_by_folder_or_job_output(run, exit_status)
    record = JobRecord.for_this_process_or_its_queued_job(run, "inside", JobState.RUNNING)
    if verdict.exit_status == EXIT_SAVED and not run.was_stop_requested_by_user_or_hook():
        write_text_atomically(run.requeue_request, "")
    elif max_restarts:
        record, verdict = _request_requeue_if_restarts_allow(run, record, verdict, max_restarts)
    if record.state is not JobState.PENDING:
        record = record.copy_ended_now(JobState.state_of_exit_status(verdict.exit_status), verdict)
    record.write(run)
    print(verdict.render(), file=sys.stderr if verdict.exit_status else sys.stdout, flush=True)
    return verdict.exit_status


def _verdict_by_folder_or_job_output(run: RunDir, exit_status: int) -> Verdict:
    if has_rank0_prepared_run_folder(run):
        verdict = conclude_run(run, exit_status)
        slurm_messages = [
            line for line in _output_lines_since_newest_requeue(run) if _ENDED_BY_SLURM.search(line)
        ]
        if slurm_messages and first_error_record(run) is None:
            verdict = Verdict.of_failure_detected_by_command(
                exit_status, Failure(Cause.UNKNOWN, f"Slurm ended the ranks: {slurm_messages[0]}")
            )
    # An earlier start of the job had completed the run.
    elif exit_status == 0 and run.request.exists():
        return Verdict(0, f"done: {run}")
    else:
        output_lines = _output_lines_since_newest_requeue(run)
        # The first task's status; srun's may be that of a task which was ended after it.
        first_task_statuses = [
            status_match[1] for line in output_lines if (status_match := _FIRST_TASK.search(line))
        ]
        exit_status = int(first_task_statuses[-1]) if first_task_statuses else exit_status or 1
        own_lines = [line for line in output_lines if not line.startswith(("srun:", "slurmstepd:"))]
        message = f"srun ended with status {exit_status} before rank 0 prepared {run}"
        last_line = own_lines[-1] if own_lines else "its output says no more"
        verdict = Verdict.of_failure_detected_by_command(
            exit_status, Failure(Cause.UNKNOWN, f"{message}: {last_line}")
        )
    if verdict.exit_status == EXIT_SAVED and _reached_time_limit_before_first_step(run):
        message = (
            "the time limit was reached before the first step; raise submit.time or lower "
            "submit.signal_seconds"
        )
        return replace(verdict.with_note(f"not requeued: {message}"), exit_status=1)
    return verdict


def _output_lines_since_newest_requeue(run: RunDir) -> list[str]:
    """Return the lines that this turn of the job has printed so far."""
    output_path = run.logs / f"slurm-{os.environ.get('SLURM_JOB_ID')}.out"
    # Turns append to one file.
    lines = read_text_or_raise_damaged(output_path).splitlines() if output_path.exists() else []
    turn_starts = [
        line_index for line_index, line in enumerate(lines) if line.startswith(TURN_PREFIX)
    ]
    return [
        line.strip() for line in lines[turn_starts[-1] + 1 if turn_starts else 0 :] if line.strip()
    ]


def _reached_time_limit_before_first_step(run: RunDir) -> bool:
    """Whether a requeued start ran into the time limit before its first step."""
    # The next start would end in the same way.
    if (
        os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0")
        or run.was_stop_requested_by_user_or_hook()
    ):
        return False
    if not has_rank0_prepared_run_folder(run):
        return True
    first_record = first_error_record(run)
    # Slurm sends SIGUSR1 `submit.signal_seconds` before the time limit.
    if run.stopped.exists() or first_record is None or first_record.signal != signal.SIGUSR1:
        return False
    start_time_ns = run.request.stat().st_mtime_ns
    return all(
        (path / COMPLETE).stat().st_mtime_ns < start_time_ns
        for _, path in run.complete_checkpoints()
    )


def _request_requeue_if_restarts_allow(
    run: RunDir, job_record: JobRecord, verdict: Verdict, max_restarts: int
) -> tuple[JobRecord, Verdict]:
    """Request a requeue if `launch.max_restarts` allows it.

    Returns:
        The record with the failed attempt, and the end with a line on the requeue, or on why there
        is none.
    """
    was_prepared = has_rank0_prepared_run_folder(run)
    start_time = run.job_script.stat().st_mtime
    failed_attempt = failed_attempt_unless_good_stopped_or_restarted(
        run, verdict, len(job_record.attempts) + 1, time.time() - start_time, was_prepared
    )
    if failed_attempt is None:
        return job_record, verdict
    attempts = (*job_record.attempts, failed_attempt)
    job_record = replace(job_record, attempts=attempts)
    reason = reason_restart_is_refused(attempts, max_restarts)
    if reason is not None:
        return job_record, verdict.with_note(reason)
    write_text_atomically(run.requeue_request, "")
    count_text = (
        f"restart {restarts_without_progress(attempts) + 1} of {max_restarts} without progress"
    )
    end_line = f"attempt {failed_attempt.number} failed; a requeue is requested ({count_text})"
    return replace(job_record, state=JobState.PENDING), verdict.with_note(end_line)


if __name__ == "__main__":
    sys.exit(record_and_print_end_and_request_requeue_if_saved())

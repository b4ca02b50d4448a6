"""Print and record the verdict of a queued run, for its job script.

    python ortlaunch/start.py ortlaunch.other_runs.ended RUN RESTARTS STATUS BEGAN

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

from ortlaunch.cause import Cause, Failure
from ortlaunch.launch import JobState
from ortlaunch.launch.attempts import failed_scheduler_job_record
from ortlaunch.launch.failure import RunEnd, classify_run_end, first_error_record
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch.restart_policy import reason_not_to_restart, restarts_without_progress
from ortlaunch.other_runs.queued import is_prepared
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.cause_text import COMMAND_PREFIX
from ortlaunch.run_folder.folder import COMPLETE, RunDir, read_own_text, write_text_atomically
from ortlaunch.schedulers.slurm import TURN

_FIRST_TASK = re.compile(r"task 0: Exited with exit code (\d+)")
# Slurm's words where it ends a step itself; a rank's end is another matter.
_BY_SLURM = re.compile(r"Task launch for \S+ failed|CANCELLED AT .* DUE TO (?!TIME LIMIT)")


def main() -> int:
    """Print and record the verdict, and return the run's exit status."""
    run = RunDir(sys.argv[1])
    limit = int(sys.argv[2])
    status = int(sys.argv[3])
    # The script touches itself when a turn begins. A node that the controller took for dead may end
    # its turn after the next one has begun.
    if run.job_script.exists() and int(run.job_script.stat().st_mtime) > int(sys.argv[4]):
        print("ortlaunch: a later turn of this job has the run", file=sys.stderr, flush=True)
        return status
    end = _end(run, status)
    record = JobRecord.at_start(run, "inside", JobState.RUNNING)
    if end.status == EXIT_SAVED and not run.was_stopped_by_user():
        write_text_atomically(run.requeue_request, "")
    elif limit:
        record, end = _after_a_fault(run, record, end, limit)
    if record.state is not JobState.PENDING:
        record = record.ended_record(
            JobState.state_of_exit_status(end.status), end.status, end.text, end.failure
        )
    record.write(run)
    print(end.text, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status


def _end(run: RunDir, status: int) -> RunEnd:
    if is_prepared(run):
        end = classify_run_end(run, status)
        ended = [line for line in _lines(run) if _BY_SLURM.search(line)]
        if ended and first_error_record(run) is None:
            end = RunEnd.from_failure(
                status, Failure(Cause.UNKNOWN, f"Slurm ended the ranks: {ended[0]}")
            )
    # An earlier start of the job had completed the run.
    elif status == 0 and run.request.exists():
        return RunEnd(0, f"done: {run}")
    else:
        said = _lines(run)
        # The first task's status; srun's may be that of a task which was ended after it.
        first = [found[1] for line in said if (found := _FIRST_TASK.search(line))]
        status = int(first[-1]) if first else status or 1
        own = [line for line in said if not line.startswith(("srun:", "slurmstepd:"))]
        why = f"srun ended with status {status} before rank 0 prepared {run}"
        last = own[-1].removeprefix(COMMAND_PREFIX) if own else "its output says no more"
        end = RunEnd.from_failure(status, Failure(Cause.UNKNOWN, f"{why}: {last}"))
    if end.status == EXIT_SAVED and _is_in_vain(run):
        why = (
            "the time limit was reached before the first step; raise submit.time or lower "
            "submit.signal_seconds"
        )
        return end.with_appended_line(f"not requeued: {why}")._replace(status=1)
    return end


def _lines(run: RunDir) -> list[str]:
    """Return the lines that this turn of the job has printed so far."""
    path = run.logs / f"slurm-{os.environ.get('SLURM_JOB_ID')}.out"
    # Turns append to one file.
    lines = read_own_text(path).splitlines() if path.exists() else []
    begins = [number for number, line in enumerate(lines) if line.startswith(TURN)]
    return [line.strip() for line in lines[begins[-1] + 1 if begins else 0 :] if line.strip()]


def _is_in_vain(run: RunDir) -> bool:
    """Whether a requeued start ran into the time limit before its first step."""
    # The next start would end in the same way.
    if os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0") or run.was_stopped_by_user():
        return False
    if not is_prepared(run):
        return True
    first = first_error_record(run)
    # Slurm sends SIGUSR1 `submit.signal_seconds` before the time limit.
    if run.stopped.exists() or first is None or first.get("signal") != signal.SIGUSR1:
        return False
    began = run.request.stat().st_mtime_ns
    return all(
        (path / COMPLETE).stat().st_mtime_ns < began for _, path in run.complete_checkpoints()
    )


def _after_a_fault(
    run: RunDir, record: JobRecord, end: RunEnd, limit: int
) -> tuple[JobRecord, RunEnd]:
    """Request a requeue if `launch.max_restarts` allows it.

    Returns:
        The record with the failed attempt, and the end with a line on the requeue, or on why there
        is none.
    """
    prepared = is_prepared(run)
    began = run.job_script.stat().st_mtime
    failed = failed_scheduler_job_record(
        run, end, len(record.attempts) + 1, time.time() - began, prepared
    )
    if failed is None:
        return record, end
    attempts = (*record.attempts, failed)
    record = replace(record, attempts=attempts)
    reason = reason_not_to_restart(attempts, limit)
    if reason is not None:
        return record, end.with_appended_line(reason)
    write_text_atomically(run.requeue_request, "")
    used = f"restart {restarts_without_progress(attempts) + 1} of {limit} without progress"
    said = f"attempt {failed.number} failed; a requeue is requested ({used})"
    return replace(record, state=JobState.PENDING), end.with_appended_line(said)


if __name__ == "__main__":
    sys.exit(main())

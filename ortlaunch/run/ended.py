"""`python ortlaunch/start.py ortlaunch.run.ended RUN STATUS`: what a queued run's ranks came to, for its batch script.

srun's status may be that of a rank that was ended because another failed. This one's is the first failing rank's, and
it writes the verdict into job.json, as `ortlaunch train` does for the ranks that it starts itself.
"""

from __future__ import annotations

import os
import signal
import sys

from ortlaunch.launch import JobState
from ortlaunch.launch.failure import End, explain_end, first_failure
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run.folder import RunDir
from ortlaunch.run.queued import is_prepared


def main() -> int:
    """Say and record how it ended; returns the run's exit status."""
    run, status = RunDir(sys.argv[1]), int(sys.argv[2])
    end = _end(run, status)
    record = JobRecord.begun(run, "inside", JobState.RUNNING)
    record.at_end(JobState.of_status(end.status), end.status, end.text).write(run)
    print(end.text, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status


def _end(run: RunDir, status: int) -> End:
    if not is_prepared(run):
        if status == 0 and run.request.exists():  # an earlier turn had done it all
            return End(0, f"done: {run}")
        return End(status or 1, f"ortlaunch: srun ended with status {status} before rank 0 prepared {run}; see above")
    end = explain_end(run, status)
    if end.status == EXIT_SAVED and _is_in_vain(run):
        why = "this turn's time was over before its first step; raise submit.time or lower submit.signal_seconds"
        return End(1, f"{end.text}\nortlaunch: not queued again: {why}")
    return end


def _is_in_vain(run: RunDir) -> bool:
    """Whether the signal before the time limit ended a turn after the first before a step: the next would be alike."""
    first, turns = first_failure(run), os.environ.get("SLURM_RESTART_COUNT", "0")
    in_time = run.stopped.exists() or first is None or first.get("signal") != signal.SIGUSR1
    if in_time or turns in ("", "0") or run.stop_request.exists():
        return False
    began = run.request.stat().st_mtime_ns
    return all((path / "COMPLETE").stat().st_mtime_ns < began for _, path in run.complete_checkpoints())


if __name__ == "__main__":
    sys.exit(main())

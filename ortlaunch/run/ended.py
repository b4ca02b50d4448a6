"""`python ortlaunch/start.py ortlaunch.run.ended RUN STATUS`: what a queued run's ranks came to, for its batch script.

srun's status may be that of a rank that was ended because another failed. This one's is the first failing rank's, and
it writes the verdict into job.json, as `ortlaunch train` does for the ranks that it starts itself.
"""

from __future__ import annotations

import sys

from ortlaunch.launch import JobState
from ortlaunch.launch.failure import End, explain_end
from ortlaunch.launch.record import JobRecord
from ortlaunch.run.folder import RunDir
from ortlaunch.schedulers import EXIT_SAVED


def main() -> int:
    """Say and record how it ended; returns the run's exit status."""
    run, status = RunDir(sys.argv[1]), int(sys.argv[2])
    end = _end(run, status)
    record = JobRecord.begun(run, "inside", JobState.RUNNING)
    record.at_end(_state(end.status), end.status, end.text).write(run)
    print(end.text, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status


def _end(run: RunDir, status: int) -> End:
    if not (run.request.exists() and run.plan.exists()):
        return End(status or 1, f"ortlaunch: srun ended with status {status} before rank 0 prepared {run}; see above")
    return explain_end(run, status)


def _state(status: int) -> JobState:
    return JobState.PREEMPTED if status == EXIT_SAVED else JobState.FAILED if status else JobState.SUCCEEDED


if __name__ == "__main__":
    sys.exit(main())

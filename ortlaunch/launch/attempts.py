"""Failed starts of the ranks: their records and their logs. restart_policy.py judges them."""

from __future__ import annotations

from ortlaunch.cause import Cause
from ortlaunch.json_types import Json
from ortlaunch.launch.failure import End, first_failure, ranks_that_began
from ortlaunch.launch.record import Attempt
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import NO_FAULT
from ortlaunch.run_folder.folder import COMPLETE, RunDir


def record_attempt(run: RunDir, end: End, number: int, seconds: float, checkpoint: int) -> Attempt:
    """Return the record of an attempt that failed.

    Args:
        seconds: duration of the attempt.
        checkpoint: step of the newest complete checkpoint at its start; 0 if there was none.
    """
    first = first_failure(run)
    began = bool(ranks_that_began(run))
    return Attempt(
        number=number,
        seconds=round(seconds, 1),
        exit_status=end.status,
        cause=_cause(end),
        verdict=end.last.partition("\n")[0],
        failure=_failure(first, end),
        step=None if not began or first is None else first.get("step"),
        checkpoint=newest_checkpoint(run),
        resumed=checkpoint,
    )


def _cause(end: End) -> Cause:
    return end.failure.kind if end.failure else Cause.UNKNOWN


def _failure(first: Json | None, end: End) -> str:
    """Return the text that is compared between attempts: the exception, or the exit status."""
    if first is None or first["secondary"] or first["type"] in ("Signal", "Exit"):
        return f"exit status {end.status}"
    message = str(first["message"]).strip().splitlines()
    return f"{first['type']}: {message[0][:200]}" if message else first["type"]


def newest_checkpoint(run: RunDir, before: float = float("inf")) -> int:
    """Return the step of the newest checkpoint that was complete before a time; 0 if there is none.

    Args:
        before: time of a file, in nanoseconds.
    """
    found = (
        step
        for step, path in run.complete_checkpoints()
        if (path / COMPLETE).stat().st_mtime_ns < before
    )
    return max(found, default=0)


def failed_turn(
    run: RunDir, end: End, number: int, seconds: float, prepared: bool
) -> Attempt | None:
    """Return the record of a scheduler's job that failed.

    None if its end is no fault, or if its command restarts the ranks itself.

    Args:
        prepared: whether rank 0 of this job prepared the run folder.
    """
    restarted = prepared and Plan.read(run.plan).started_by.is_ours
    if end.status == 0 or end.status in NO_FAULT or restarted or run.stop_request.exists():
        return None
    if prepared:
        return record_attempt(
            run, end, number, seconds, newest_checkpoint(run, run.request.stat().st_mtime_ns)
        )
    newest = newest_checkpoint(run)
    failure = f"exit status {end.status}"
    return Attempt(
        number, round(seconds, 1), end.status, _cause(end), end.last, failure, None, newest, newest
    )


def set_aside(run: RunDir) -> int:
    """Move the logs and errors of a failed start to attempts/N.

    Returns:
        N; 0 if no rank left a record.
    """
    if not run.errors.is_dir() or not any(run.errors.iterdir()):
        return 0
    taken = [int(path.name) for path in run.attempts.glob("[0-9]*") if path.name.isdigit()]
    folder = run.attempt(number := max(taken, default=0) + 1)
    (folder / run.logs.name).mkdir(parents=True)
    for log in run.logs.glob("*"):
        # Slurm writes a job's own output there, also the lines of this start.
        if not log.match("slurm-*.out"):
            log.rename(folder / run.logs.name / log.name)
    run.errors.rename(folder / run.errors.name)
    return number

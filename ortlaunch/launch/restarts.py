"""`launch.max_restarts`: start the ranks again after a fault, from their last complete checkpoint.

It is the same for all of ortlaunch's launchers. Each attempt's logs and errors are kept in
attempts/N, its cause in job.json. In a Slurm job that `ortlaunch submit` queued, other_runs/ended.py
requeues instead. Under the user's own launcher nothing restarts the ranks, and
planning/describe.py prints that.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ortlaunch.launch.attempts import newest_checkpoint, record_attempt, set_aside
from ortlaunch.launch.failure import End
from ortlaunch.launch.record import Attempt
from ortlaunch.launch.restart_policy import in_vain, restarts_without_progress, wait_seconds
from ortlaunch.rank import EXIT_SAVED, NO_FAULT
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted, duration


class Ended(NamedTuple):
    """The end of one start of the ranks; `stopped`: a signal to this command stopped it."""

    end: End
    stopped: bool


def supervise(
    run: RunDir,
    limit: int,
    record: Callable[[Sequence[Attempt]], None],
    start: Callable[[int], Ended],
) -> Ended:
    """Start the ranks, and again after each fault, until they end well or a restart is useless.

    Args:
        limit: highest number of restarts without progress.
        record: function that records the failed attempts, after each of them.
        start: function that starts the ranks and waits; its argument counts the starts from 1.
    """
    failed: list[Attempt] = []
    checkpoint = newest_checkpoint(run)
    for number in itertools.count(1):
        began = time.monotonic()
        ended = start(number)
        # A requested restart is no fault and counts as no attempt.
        if _is_to_go_on(run, ended):
            checkpoint = newest_checkpoint(run)
            continue
        if ended.end.status == 0 or ended.stopped or ended.end.status in NO_FAULT or not limit:
            return _with_count(ended, failed)
        failed.append(
            record_attempt(run, ended.end, len(failed) + 1, time.monotonic() - began, checkpoint)
        )
        record(failed)
        reason = in_vain(failed, limit)
        if not reason:
            _wait(run, failed, limit)
            # A stop may have been requested during the wait.
            reason = "not restarted: a stop was requested" if run.stop_request.exists() else None
        if reason:
            return ended._replace(end=ended.end.followed_by(reason))
        # Only before a further start: the last attempt's logs and errors stay in the run folder.
        kept = set_aside(run)
        failed[-1] = replace(failed[-1], folder=f"{run.attempts.name}/{kept}" if kept else None)
        record(failed)
        checkpoint = newest_checkpoint(run)
    raise AssertionError


def _is_to_go_on(run: RunDir, ended: Ended) -> bool:
    """Whether the run saved because `ortlaunch restart` requested another start."""
    if ended.stopped or ended.end.status != EXIT_SAVED or not run.restart_request.exists():
        return False
    # The same request stopped the ranks; left there, it would stop the next ones, too.
    run.stop_request.unlink(missing_ok=True)
    print(
        f"{ended.end.text}\nortlaunch: restarting the ranks, as requested",
        file=sys.stderr,
        flush=True,
    )
    return True


def _wait(run: RunDir, failed: Sequence[Attempt], limit: int) -> None:
    seconds = wait_seconds(failed)
    newest = newest_checkpoint(run)
    where = f"after step {newest}" if newest else "at step 1, because no checkpoint is complete"
    used = restarts_without_progress(failed) + 1
    print(
        f"{failed[-1].verdict}\nortlaunch: attempt {failed[-1].number} failed; "
        "restarting the ranks in "
        f"{seconds:.0f} s, {where} (restart {used} of {limit} without progress)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    time.sleep(seconds)


def _with_count(ended: Ended, failed: Sequence[Attempt]) -> Ended:
    """Return a good end with a note on the restarts before it."""
    if not failed or ended.end.status:
        return ended
    took = duration(sum(one.seconds for one in failed))
    said = (
        f"{ended.end.text}, after {counted(len(failed), 'restart')} (failed attempts took {took})"
    )
    return ended._replace(end=End(0, said))

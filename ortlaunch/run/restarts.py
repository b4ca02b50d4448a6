"""`launch.max_restarts`: after a fault the ranks are started again, from their last complete checkpoint.

One place for all launchers of ours; each attempt's logs and errors stay in attempts/N, its cause in job.json. In a job
of Slurm's that `ortlaunch submit` queued, runs/ended.py requeues instead. Under a launcher of the user's own there is
nobody to restart: planning/describe.py says so.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ortlaunch.launch.attempts import (
    in_vain,
    newest_checkpoint,
    record_attempt,
    restarts_without_progress,
    set_aside,
    wait_seconds,
)
from ortlaunch.launch.failure import End
from ortlaunch.launch.record import Attempt
from ortlaunch.rank import EXIT_SAVED, NO_FAULT
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted, duration


class Ended(NamedTuple):
    """How one start of the ranks ended; `stopped`: by a signal to this command."""

    end: End
    stopped: bool


def supervise(run: RunDir, limit: int, file: JobFile, start: Callable[[int], Ended]) -> Ended:
    """Start the ranks, and after a fault again, until they end well or it is in vain.

    Args:
        limit: restarts without progress.
        start: starts them and waits; its argument counts from 1.
    """
    failed: list[Attempt] = []
    checkpoint = newest_checkpoint(run)
    for number in itertools.count(1):
        began = time.monotonic()
        ended = start(number)
        if _is_to_go_on(run, ended):
            checkpoint = newest_checkpoint(run)
            continue
        if ended.end.status == 0 or ended.stopped or ended.end.status in NO_FAULT or not limit:
            return _with_count(ended, failed)
        failed.append(
            record_attempt(run, ended.end, len(failed) + 1, time.monotonic() - began, checkpoint)
        )
        file.failed(failed)
        reason = in_vain(failed, limit)
        if not reason:
            _wait(run, failed, limit)
            reason = (
                "not started again: its end was asked for" if run.stop_request.exists() else None
            )
        if reason:
            return ended._replace(end=ended.end.followed_by(reason))
        kept = set_aside(run)
        failed[-1] = replace(failed[-1], folder=f"{run.attempts.name}/{kept}" if kept else None)
        file.failed(failed)
        checkpoint = newest_checkpoint(run)
    raise AssertionError


def _is_to_go_on(run: RunDir, ended: Ended) -> bool:
    """Whether it has saved because `ortlaunch restart` asked for another start."""
    if ended.stopped or ended.end.status != EXIT_SAVED or not run.restart_request.exists():
        return False
    run.stop_request.unlink(missing_ok=True)  # else it would be for the next ranks, too
    print(
        f"{ended.end.text}\nortlaunch: the ranks are started again, as was asked for",
        file=sys.stderr,
        flush=True,
    )
    return True


def _wait(run: RunDir, failed: Sequence[Attempt], limit: int) -> None:
    seconds = wait_seconds(failed)
    newest = newest_checkpoint(run)
    where = f"after step {newest}" if newest else "at step 1, for no checkpoint is complete"
    used = restarts_without_progress(failed) + 1
    print(
        f"{failed[-1].verdict}\nortlaunch: attempt {failed[-1].number} failed; the ranks are started again in "
        f"{seconds:.0f} s, {where} (restart {used} of {limit} without progress)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    time.sleep(seconds)


def _with_count(ended: Ended, failed: Sequence[Attempt]) -> Ended:
    """A good end says that it was not the first."""
    if not failed or ended.end.status:
        return ended
    took = duration(sum(one.seconds for one in failed))
    said = (
        f"{ended.end.text}, after {counted(len(failed), 'restart')} (failed attempts took {took})"
    )
    return ended._replace(end=End(0, said))

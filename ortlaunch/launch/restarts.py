"""`launch.max_restarts`: start the ranks again after a fault, from their last complete checkpoint.

It is the same for all of ortlaunch's launchers. Each attempt's logs and errors are kept in
attempts/N, its cause in job.json. In a Slurm job that `ortlaunch submit` queued, started_runs/ended.py
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

from ortlaunch.base.units import clock_duration, count_with_noun
from ortlaunch.launch.attempts import (
    move_logs_to_new_attempt_and_return_number_or_0,
    record_of_failed_attempt_with_last_step,
)
from ortlaunch.launch.record import Attempt
from ortlaunch.launch.restart_policy import (
    reason_restart_is_refused,
    restart_delay_seconds,
    restarts_without_progress,
)
from ortlaunch.rank import EXIT_SAVED, NO_FAULT
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.verdict import Verdict


class EndedAttempt(NamedTuple):
    """The end of one start of the ranks; `stopped`: a signal to this command stopped it."""

    verdict: Verdict
    was_stopped_by_signal: bool


def start_ranks_and_restart_after_faults_or_on_request(
    run: RunDir,
    max_restarts_without_progress: int,
    record_failed_attempts: Callable[[Sequence[Attempt]], None],
    start_and_wait: Callable[[int], EndedAttempt],
) -> EndedAttempt:
    """Start the ranks, and again after each fault, until they end well or a restart is useless.

    Args:
        max_restarts_without_progress: highest number of restarts without progress.
        record_failed_attempts: function that records the failed attempts, after each of them.
        start_and_wait: function that starts the ranks and waits; its argument counts the starts from 1.
    """
    failed_attempts: list[Attempt] = []
    checkpoint_at_start = run.newest_checkpoint_step_or_zero()
    for start_number in itertools.count(1):
        began = time.monotonic()
        ended = start_and_wait(start_number)
        # A requested restart is no fault and counts as no attempt.
        if _consume_and_announce_restart_request_if_saved(run, ended):
            checkpoint_at_start = run.newest_checkpoint_step_or_zero()
            continue
        if (
            ended.verdict.exit_status == 0
            or ended.was_stopped_by_signal
            or ended.verdict.exit_status in NO_FAULT
            or not max_restarts_without_progress
        ):
            return _add_restart_count_to_successful_end(ended, failed_attempts)
        failed_attempts.append(
            record_of_failed_attempt_with_last_step(
                run,
                ended.verdict,
                len(failed_attempts) + 1,
                time.monotonic() - began,
                checkpoint_at_start,
            )
        )
        record_failed_attempts(failed_attempts)
        reason = reason_restart_is_refused(failed_attempts, max_restarts_without_progress)
        if not reason:
            _announce_and_sleep_until_restart(run, failed_attempts, max_restarts_without_progress)
            # A stop may have been requested during the wait.
            reason = "not restarted: a stop was requested" if run.stop_request.exists() else None
        if reason:
            return ended._replace(verdict=ended.verdict.with_note(reason))
        # Only before a further start: the last attempt's logs and errors stay in the run folder.
        attempt_number = move_logs_to_new_attempt_and_return_number_or_0(run)
        failed_attempts[-1] = replace(
            failed_attempts[-1],
            folder=f"{run.attempts.name}/{attempt_number}" if attempt_number else None,
        )
        record_failed_attempts(failed_attempts)
        checkpoint_at_start = run.newest_checkpoint_step_or_zero()
    raise AssertionError


def _consume_and_announce_restart_request_if_saved(
    run: RunDir, ended_attempt: EndedAttempt
) -> bool:
    """Whether the run saved because `ortlaunch restart` requested another start."""
    if (
        ended_attempt.was_stopped_by_signal
        or ended_attempt.verdict.exit_status != EXIT_SAVED
        or not run.restart_request.exists()
    ):
        return False
    # The same request stopped the ranks; left there, it would stop the next ones, too.
    run.stop_request.unlink(missing_ok=True)
    print(
        f"{ended_attempt.verdict.render()}\nortlaunch: restarting the ranks, as requested",
        file=sys.stderr,
        flush=True,
    )
    return True


def _announce_and_sleep_until_restart(
    run: RunDir, failed_attempts: Sequence[Attempt], max_restarts_without_progress: int
) -> None:
    seconds = restart_delay_seconds(failed_attempts)
    newest = run.newest_checkpoint_step_or_zero()
    position_text = (
        f"after step {newest}" if newest else "at step 1, because no checkpoint is complete"
    )
    used = restarts_without_progress(failed_attempts) + 1
    print(
        f"{failed_attempts[-1].message}\nortlaunch: attempt {failed_attempts[-1].number} failed; "
        "restarting the ranks in "
        f"{seconds:.0f} s, {position_text} (restart {used} of {max_restarts_without_progress} without progress)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    time.sleep(seconds)


def _add_restart_count_to_successful_end(
    ended_attempt: EndedAttempt, failed_attempts: Sequence[Attempt]
) -> EndedAttempt:
    if not failed_attempts or ended_attempt.verdict.exit_status:
        return ended_attempt
    duration_text = clock_duration(sum(attempt.seconds for attempt in failed_attempts))
    message = (
        f"{ended_attempt.verdict.message}, after {count_with_noun(len(failed_attempts), 'restart')} "
        f"(failed attempts took {duration_text})"
    )
    return ended_attempt._replace(verdict=Verdict(0, message))

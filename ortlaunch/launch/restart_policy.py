"""Whether failed ranks are started again, and how long to wait before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ortlaunch.base.cause import Cause
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch.record import Attempt

# Seconds before the next start: the first value is doubled up to the longest.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
# Steps that count as progress if no checkpoint was written.
_FURTHER_STEPS = 100
# 128 + SIGKILL
_KILLED = 137


def reason_restart_is_refused(
    failed_attempts: Sequence[Attempt], max_restarts_without_progress: int
) -> str | None:
    """Return why the ranks are not started again; None if they are."""
    *earlier_attempts, last_attempt = failed_attempts
    if earlier_attempts and _repeats_deterministic_failure(earlier_attempts[-1], last_attempt):
        where = (
            "before any rank started"
            if last_attempt.step is None
            else f"after step {last_attempt.step}"
        )
        return (
            f"not restarted: the same failure {where} as before ({last_attempt.failure}), so it is "
            "deterministic"
        )
    if restarts_without_progress(failed_attempts) >= max_restarts_without_progress:
        return (
            f"not started again: {count_with_noun(max_restarts_without_progress, 'restart')} without progress "
            f"(launch.max_restarts: {max_restarts_without_progress})"
        )
    return None


def restarts_without_progress(failed_attempts: Sequence[Attempt]) -> int:
    """Count the newest starts of which each made no progress over the one before it."""
    count = 0
    for earlier, later in zip(failed_attempts, failed_attempts[1:]):
        count = 0 if _made_progress(earlier, later) else count + 1
    return count


def _made_progress(earlier_attempt: Attempt, later_attempt: Attempt) -> bool:
    """Whether the later attempt left a new complete checkpoint, or did many more steps."""
    return (
        later_attempt.checkpoint > earlier_attempt.checkpoint
        or (later_attempt.step or 0) >= (earlier_attempt.step or 0) + _FURTHER_STEPS
    )


def _repeats_deterministic_failure(earlier_attempt: Attempt, later_attempt: Attempt) -> bool:
    # A lost host and a SIGKILL come from outside and may not come again. A SIGKILL for memory does.
    is_killed = (
        later_attempt.exit_status == _KILLED and later_attempt.cause is not Cause.OUT_OF_MEMORY
    )
    if is_killed or later_attempt.cause is Cause.HOST_LOST:
        return False
    return (
        _text_without_numbers(earlier_attempt.failure),
        earlier_attempt.exit_status,
        earlier_attempt.step,
    ) == (
        _text_without_numbers(later_attempt.failure),
        later_attempt.exit_status,
        later_attempt.step,
    )


def _text_without_numbers(failure: str) -> str:
    """Return the text without numbers, such as process ids and addresses, which vary by start."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", failure)


def restart_delay_seconds(failed_attempts: Sequence[Attempt]) -> float:
    """Return the seconds to wait before the next start; they double with each one in vain."""
    return float(
        min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(restarts_without_progress(failed_attempts), 20))
    )

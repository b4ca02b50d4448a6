"""Whether failed ranks are started again, and how long to wait before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ortlaunch.cause import Cause
from ortlaunch.launch.record import Attempt
from ortlaunch.units import counted

# Seconds before the next start: the first value is doubled up to the longest.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
# Steps that count as progress if no checkpoint was written.
_FURTHER_STEPS = 100
# 128 + SIGKILL
_KILLED = 137


def in_vain(failed: Sequence[Attempt], limit: int) -> str | None:
    """Return why the ranks are not started again; None if they are."""
    *before, last = failed
    if before and _same(before[-1], last):
        where = "before any rank started" if last.step is None else f"after step {last.step}"
        return (
            f"not restarted: the same failure {where} as before ({last.failure}), so it is "
            "deterministic"
        )
    if restarts_without_progress(failed) >= limit:
        return (
            f"not started again: {counted(limit, 'restart')} without progress "
            f"(launch.max_restarts: {limit})"
        )
    return None


def restarts_without_progress(failed: Sequence[Attempt]) -> int:
    """Count the newest starts of which each made no progress over the one before it."""
    count = 0
    for before, after in zip(failed, failed[1:]):
        count = 0 if _progressed(before, after) else count + 1
    return count


def _progressed(before: Attempt, after: Attempt) -> bool:
    """Whether the later attempt left a new complete checkpoint, or did many more steps."""
    return (
        after.checkpoint > before.checkpoint
        or (after.step or 0) >= (before.step or 0) + _FURTHER_STEPS
    )


def _same(one: Attempt, other: Attempt) -> bool:
    """Whether the second failure repeats the first."""
    # A lost host and a SIGKILL come from outside and may not come again. A SIGKILL for memory does.
    is_killed = other.exit_status == _KILLED and other.cause is not Cause.OUT_OF_MEMORY
    if is_killed or other.cause is Cause.HOST_LOST:
        return False
    return (_words(one.failure), one.exit_status, one.step) == (
        _words(other.failure),
        other.exit_status,
        other.step,
    )


def _words(failure: str) -> str:
    """Return the text without numbers, such as process ids and addresses, which vary by start."""
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", failure)


def wait_seconds(failed: Sequence[Attempt]) -> float:
    """Return the seconds to wait before the next start; they double with each one in vain."""
    return float(min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(restarts_without_progress(failed), 20)))

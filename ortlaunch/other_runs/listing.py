"""The status of all runs of this user; runs_table.py shows them."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import islice

from ortlaunch.errors import InputError, first_message_line
from ortlaunch.launch import JobState
from ortlaunch.other_runs import registry
from ortlaunch.other_runs.queued import SharedQueue
from ortlaunch.other_runs.status import Status, read_status
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import number_or_none

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def newest_statuses(
    newest: int | None, name: str = "", state: str | None = None, metric: str | None = None
) -> list[Status]:
    """Return the status of the newest runs; those with unreadable files are left out.

    Args:
        newest: the largest number of them; None: all.
        name: a part of the folder's path or of the run's name, with `*` and `?` as in a shell.
        state: the state as `status` prints it.
        metric: a limit of a newest value, as `evaluation_loss<1.5`.

    Raises:
        InputError: there is no such state, or the limit is no limit.
    """
    states = [each.value for each in JobState]
    if state is not None and state not in states:
        raise InputError(f"state: got {state}; one of {', '.join(states)}")
    keeps = _limit(metric) if metric else lambda status: True
    queue = SharedQueue()
    found = (
        status
        for run in registry.runs()
        if fnmatchcase(str(run), f"*{name}*") or fnmatchcase(registry.run_name(run), f"*{name}*")
        for status in _readable(run, queue)
        if state in (None, status.state.value) and keeps(status)
    )
    return list(islice(found, newest))


def _readable(run: RunDir, queue: SharedQueue) -> Iterator[Status]:
    # Whatever one folder holds, the other runs are listed.
    try:
        yield read_status(run, queue)
    except Exception as error:
        print(f"left out: {run}: {first_message_line(error)}", file=sys.stderr, flush=True)


def _limit(metric: str) -> Callable[[Status], bool]:
    """Return whether a run's newest value is within a limit."""
    parts = re.fullmatch(r"(\w+)\s*([<>]=?)\s*([-+.e\d]+)", metric)
    limit = number_or_none(parts[3]) if parts else None
    if parts is None or limit is None:
        raise InputError(f"metric: got {metric}; give a limit, as 'evaluation_loss<1.5'")
    name = parts[1]
    compare = _COMPARISONS[parts[2]]

    def keeps(status: Status) -> bool:
        value = number_or_none(status.metrics.get(name))
        return value is not None and compare(value, limit)

    return keeps

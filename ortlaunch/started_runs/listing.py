"""The status of all runs of this user; runs_table.py shows them."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import islice

from ortlaunch.base.errors import InputError, first_message_line
from ortlaunch.base.units import number_or_none
from ortlaunch.launch import JobState
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs import registry
from ortlaunch.started_runs.queued import SharedQueue
from ortlaunch.started_runs.status import Status, read_status

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def newest_statuses_that_match(
    max_count: int | None,
    name_pattern: str = "",
    state_name: str | None = None,
    metric_limit: str | None = None,
) -> list[Status]:
    """Return the status of the newest runs; those with unreadable files are left out.

    Args:
        max_count: the largest number of them; None: all.
        name_pattern: a part of the folder's path or of the run's name, with `*` and `?` as in a shell.
        state_name: the state as `status` prints it.
        metric_limit: a limit of a newest value, as `evaluation_loss<1.5`.

    Raises:
        InputError: there is no such state, or the limit is no limit.
    """
    state_names = [job_state.value for job_state in JobState]
    if state_name is not None and state_name not in state_names:
        raise InputError(f"state: got {state_name}; one of {', '.join(state_names)}")
    is_within_limit = (
        _parse_metric_limit_predicate_or_refuse(metric_limit)
        if metric_limit
        else lambda status: True
    )
    queue = SharedQueue()
    matching_statuses = (
        status
        for run in registry.list_runs_and_remove_stale_entries()
        if fnmatchcase(str(run), f"*{name_pattern}*")
        or fnmatchcase(registry.run_name(run), f"*{name_pattern}*")
        for status in _status_if_readable(run, queue)
        if state_name in (None, status.state.value) and is_within_limit(status)
    )
    return list(islice(matching_statuses, max_count))


def _status_if_readable(run: RunDir, queue: SharedQueue) -> Iterator[Status]:
    # Whatever one folder holds, the other runs are listed.
    try:
        yield read_status(run, queue)
    except Exception as error:
        print(f"left out: {run}: {first_message_line(error)}", file=sys.stderr, flush=True)


def _parse_metric_limit_predicate_or_refuse(metric_limit: str) -> Callable[[Status], bool]:
    """Return whether a run's newest value is within a limit."""
    limit_match = re.fullmatch(r"(\w+)\s*([<>]=?)\s*([-+.e\d]+)", metric_limit)
    limit = number_or_none(limit_match[3]) if limit_match else None
    if limit_match is None or limit is None:
        raise InputError(f"metric: got {metric_limit}; give a limit, as 'evaluation_loss<1.5'")
    metric_name = limit_match[1]
    compare = _COMPARISONS[limit_match[2]]

    def is_within_limit(status: Status) -> bool:
        value = number_or_none(status.metrics.get(metric_name))
        return value is not None and compare(value, limit)

    return is_within_limit

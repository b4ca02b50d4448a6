"""The table of `ortlaunch list`: a row for each run, and under a failed one the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.other_runs.registry import TRAINING
from ortlaunch.other_runs.status import Status
from ortlaunch.run_folder import cause_text
from ortlaunch.units import align_columns, clock_duration, number_or_none, shorten_line

_HEAD = ("state", "step", "loss", "metric", "time", "run")


def runs_table(statuses: Sequence[Status], columns: int) -> str:
    """Return the table for a person.

    Args:
        statuses: the runs, in the order of the rows.
        columns: width of the terminal; a longer reason or folder is shortened.
    """
    if not statuses:
        return "no runs"
    values = [_values(status) for status in statuses]
    # The folder has what the other columns leave.
    taken = len(align_columns([_HEAD, *((*row, "") for row in values)])[0]) - len(_HEAD[-1])
    rows = [(*row, _folder(status, columns - taken)) for row, status in zip(values, statuses)]
    head, *lines = align_columns([_HEAD, *rows])
    reasons = [_reason(status, columns) for status in statuses]
    return "\n".join([head, *(text for pair in zip(lines, reasons) for text in pair if text)])


def _values(status: Status) -> tuple[str, ...]:
    step = "-" if status.step is None else f"{status.step}/{status.steps or '?'}"
    loss = number_or_none(status.metrics.get("loss"))
    # The process is on another host, so the recorded state may be out of date.
    doubt = "" if status.certain else "?"
    return (
        status.state_name + doubt,
        step,
        "-" if loss is None else f"{loss:.4f}",
        _metric(status),
        "-" if status.seconds is None else clock_duration(status.seconds),
    )


def _metric(status: Status) -> str:
    """Return the newest value of the evaluation's first metric, or the evaluation loss."""
    for name in (*(name for name in METRICS if name != "loss"), "loss"):
        value = number_or_none(status.metrics.get(f"evaluation_{name}"))
        if value is not None:
            return METRICS[name].shown.removeprefix("evaluation ").format(value)
    return "-"


def _folder(status: Status, columns: int) -> str:
    """Return the run's folder as seen from here; without its first parts if it is too long."""
    mark = "" if status.purpose == TRAINING else f" ({status.purpose})"
    path = Path(status.run)
    here = Path(os.path.realpath(os.curdir))
    parts = (path.relative_to(here) if here in path.parents else path).parts
    text = str(Path(*parts))
    # `step_N` of an evaluation needs the name of its run.
    least = 3 if parts[-2:-1] == ("evaluations",) else 1
    while len(text) + len(mark) > columns and len(parts) > least:
        parts = parts[1:]
        text = str(Path("...", *parts))
    if len(parts) == least == 3:
        text = str(Path(parts[0], parts[2]))
    # The name alone stands for a training.
    return (path.name if len(parts) == 1 else text) + mark


def _reason(status: Status, columns: int) -> str:
    """Return an indented line with the cause of a failure, else of a fallback or on the best step."""
    failure = status.job.failure if status.state.is_end else None
    reason = (
        cause_text.diagnosis_verdict(failure) if failure else status.fallback or status.best_line
    )
    if not reason:
        return ""
    return f"    {shorten_line(reason, columns - 4)}"

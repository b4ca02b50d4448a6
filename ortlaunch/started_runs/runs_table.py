"""The table of `ortlaunch list`: a row for each run, and under a failed one the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.base.units import (
    aligned_table_lines,
    clock_duration,
    number_or_none,
    shorten_to_one_line,
)
from ortlaunch.started_runs.registry import TRAINING_PURPOSE
from ortlaunch.started_runs.status import Status
from ortlaunch.tables.metrics import METRICS

_TABLE_HEAD = ("state", "step", "loss", "metric", "time", "run")


def runs_table_text(statuses: Sequence[Status], terminal_columns: int) -> str:
    """Return the table for a person.

    Args:
        statuses: the runs, in the order of the rows.
        terminal_columns: width of the terminal; a longer reason or folder is shortened.
    """
    if not statuses:
        return "no runs"
    row_values = [_state_step_loss_evaluation_and_duration_cells(status) for status in statuses]
    # The folder has what the other columns leave.
    used_columns = len(
        aligned_table_lines([_TABLE_HEAD, *((*row, "") for row in row_values)])[0]
    ) - len(_TABLE_HEAD[-1])
    rows = [
        (*row, _shortened_run_folder_text(status, terminal_columns - used_columns))
        for row, status in zip(row_values, statuses)
    ]
    head_line, *lines = aligned_table_lines([_TABLE_HEAD, *rows])
    reason_lines = [_failure_fallback_or_best_line(status, terminal_columns) for status in statuses]
    return "\n".join(
        [head_line, *(text for pair in zip(lines, reason_lines) for text in pair if text)]
    )


def _state_step_loss_evaluation_and_duration_cells(run_status: Status) -> tuple[str, ...]:
    step_text = "-" if run_status.step is None else f"{run_status.step}/{run_status.steps or '?'}"
    newest_loss = number_or_none(run_status.metrics.get("loss"))
    # The process is on another host, so the recorded state may be out of date.
    doubt_mark = "" if run_status.certain else "?"
    return (
        run_status.state_name + doubt_mark,
        step_text,
        "-" if newest_loss is None else f"{newest_loss:.4f}",
        _newest_evaluation_metric_text(run_status),
        "-" if run_status.seconds is None else clock_duration(run_status.seconds),
    )


def _newest_evaluation_metric_text(run_status: Status) -> str:
    """Return the newest value of the evaluation's first metric, or the evaluation loss."""
    for name in (*(name for name in METRICS if name != "loss"), "loss"):
        value = number_or_none(run_status.metrics.get(f"evaluation_{name}"))
        if value is not None:
            return METRICS[name].shown.removeprefix("evaluation ").format(value)
    return "-"


def _shortened_run_folder_text(run_status: Status, max_columns: int) -> str:
    """Return the run's folder as seen from here; without its first parts if it is too long."""
    purpose_mark = "" if run_status.purpose == TRAINING_PURPOSE else f" ({run_status.purpose})"
    path = Path(run_status.run)
    current_folder = Path(os.path.realpath(os.curdir))
    parts = (path.relative_to(current_folder) if current_folder in path.parents else path).parts
    text = str(Path(*parts))
    # `step_N` of an evaluation needs the name of its run.
    least_part_count = 3 if parts[-2:-1] == ("evaluations",) else 1
    while len(text) + len(purpose_mark) > max_columns and len(parts) > least_part_count:
        parts = parts[1:]
        text = str(Path("...", *parts))
    if len(parts) == least_part_count == 3:
        text = str(Path(parts[0], parts[2]))
    # The name alone stands for a training.
    return (path.name if len(parts) == 1 else text) + purpose_mark


def _failure_fallback_or_best_line(run_status: Status, terminal_columns: int) -> str:
    verdict = run_status.job.verdict if run_status.state.is_end else None
    reason = (
        verdict.explanation or verdict.message
        if verdict is not None and verdict.exit_status
        else run_status.fallback or run_status.early_stop_and_best_line
    )
    if not reason:
        return ""
    return f"    {shorten_to_one_line(reason, terminal_columns - 4)}"

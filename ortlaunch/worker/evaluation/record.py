"""The record of an evaluation, and its lines for the terminal."""

from __future__ import annotations

from ortlaunch.run_folder.records import Evaluation
from ortlaunch.tables.metrics import METRICS


def build_evaluation_record(
    evaluated_step: int | None, sample_count: int, all_metrics: dict[str, float]
) -> Evaluation:
    """Return the record: the table's metrics in its order, and the user's own values."""
    metrics = {name: all_metrics[name] for name in METRICS if name in all_metrics}
    user_values = {name: value for name, value in all_metrics.items() if name not in METRICS}
    return Evaluation(evaluated_step, sample_count, metrics, user_values or None)


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return one line for each value."""
    step = {} if evaluation.step is None else {"step": evaluation.step}
    rows = {**step, "samples": evaluation.samples, **evaluation.metrics, **(evaluation.own or {})}
    return [f"  {name.replace('_', ' '):24}{value:>14,.6g}" for name, value in rows.items()]

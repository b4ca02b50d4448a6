"""The record of an evaluation, and its lines for the terminal."""

from __future__ import annotations

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.run_folder.records import Evaluation


def record_of(step: int | None, samples: int, measured: dict[str, float]) -> Evaluation:
    """Return the record: the table's metrics in its order, and the user's own values."""
    metrics = {name: measured[name] for name in METRICS if name in measured}
    own = {name: value for name, value in measured.items() if name not in METRICS}
    return Evaluation(step, samples, metrics, own or None)


def table(measured: Evaluation) -> list[str]:
    """Return one line for each value."""
    step = {} if measured.step is None else {"step": measured.step}
    rows = {**step, "samples": measured.samples, **measured.metrics, **(measured.own or {})}
    return [f"  {name.replace('_', ' '):24}{value:>14,.6g}" for name, value in rows.items()]

"""The record of an evaluation, and its lines for a person."""

from __future__ import annotations

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.run_folder.records import Evaluation


def record_of(step: int | None, samples: int, measured: dict[str, float]) -> Evaluation:
    """The metrics of the table in its order, numbers of the user's own apart."""
    metrics = {name: measured[name] for name in METRICS if name in measured}
    own = {name: value for name, value in measured.items() if name not in METRICS}
    return Evaluation(step, samples, metrics, own or None)


def table(measured: Evaluation) -> list[str]:
    """A line for each number that there is."""
    step = {} if measured.step is None else {"step": measured.step}
    rows = {**step, "samples": measured.samples, **measured.metrics, **(measured.own or {})}
    return [f"  {name.replace('_', ' '):24}{value:>14,.6g}" for name, value in rows.items()]

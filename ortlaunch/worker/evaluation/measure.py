"""The interface of the metrics of an evaluation.

The table in `ortlaunch/tables/metrics.py` names an implementation for each metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from ortlaunch.tables.metrics import measures_of_task
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.process_group.distributed import DistributedContext

SAMPLE_INDICES = "sample_indices"
"""Name of the indices of a batch's samples that count, among the values that a measure gets."""


class MetricMeasure(Protocol):
    """The counts of one evaluation on one rank.

    Its argument is the model that is evaluated. One of classes has `confusion`, too.
    """

    def count_micro_batch(
        self, output: Any, labels: Mapping[str, Tensor], is_counted: bool
    ) -> None:
        """Count a micro batch.

        Args:
            output: the model's output, by name; for a language model the result of `language_model_metric_inputs`.
            labels: the labels of the batch, by name, and its other values.
            is_counted: if false, the batch only fills a rank's turn and none of its samples counts.
        """

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the metrics by name, over all ranks (collective).

        Args:
            group: the ranks of the run.
            loss: the loss of the evaluation.
        """


def create_measures_of_task(task: str, evaluated_model: EvaluatedModel) -> list[MetricMeasure]:
    """Return the measures that an evaluation of a model task needs."""
    created = []
    for row in measures_of_task(task):
        module, _, name = row.by.partition(":")
        created.append(getattr(import_module(module), name)(evaluated_model))
    return created


class SumOfCounts:
    """Sums of a few counts over batches and ranks, kept on the device."""

    def __init__(self, size: int) -> None:
        self._total: Any = torch.zeros(size, dtype=torch.float64)

    def add_batch_counts(self, batch_counts: Tensor, is_counted: bool) -> None:
        """Add the counts of a batch."""
        if is_counted:
            self._total = self._total.to(batch_counts.device) + batch_counts.double()

    def sums_over_ranks(self, group: DistributedContext) -> list[float]:
        """Return the sums over all ranks (collective)."""
        return [sum(values) for values in zip(*group.gather_numbers(self._total.tolist()))]


def logits_or_none(model_output: Any) -> Tensor | None:
    """Return the logits of words or classes in an output of transformers; None if it has none."""
    logits: Tensor | None = model_output and model_output.get(
        "prediction_logits", model_output.get("logits")
    )
    return logits

"""What counts metrics over an evaluation; the table in `ortlaunch/evaluation_metrics.py` names one for each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from ortlaunch.evaluation_metrics import measures_of
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.process_group.distributed import DistributedContext


class MetricMeasure(Protocol):
    """Counts of one evaluation on one rank; made with the Engine whose model is evaluated."""

    def add(self, output: Any, labels: Mapping[str, Tensor], counts: bool) -> None:
        """Count a micro batch.

        Args:
            output: of the model, by name; of a language model what `word_outputs` makes of it.
            labels: those of the batch, by name.
            counts: False: the batch fills a rank's turn, and none of its samples counts.
        """

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """The metrics by name, over all ranks (collective).

        Args:
            loss: of the evaluation.
        """


def measures(task: str, engine: TrainingEngine) -> list[MetricMeasure]:
    """All that an evaluation of a model task needs."""
    found = []
    for row in measures_of(task):
        module, _, name = row.by.partition(":")
        found.append(getattr(import_module(module), name)(engine))
    return found


class SumOfCounts:
    """Sums of a few counts over batches and ranks, kept on the device."""

    def __init__(self, size: int) -> None:
        self._total: Any = torch.zeros(size, dtype=torch.float64)

    def add(self, found: Tensor, counts: bool) -> None:
        """The counts of a batch."""
        if counts:
            self._total = self._total.to(found.device) + found.double()

    def read(self, group: DistributedContext) -> list[float]:
        """Over all ranks (collective)."""
        return [sum(values) for values in zip(*group.gather_numbers(self._total.tolist()))]


def logits_of(output: Any) -> Tensor | None:
    """Of words or classes, in what a model of transformers returns; None: there are none."""
    found: Tensor | None = output and output.get("prediction_logits", output.get("logits"))
    return found

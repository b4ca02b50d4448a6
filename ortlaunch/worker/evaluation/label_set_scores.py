"""Metrics of sets of classes over all ranks, computed by torchmetrics.

A class is predicted where its probability is above 0.5, that is where its logit is above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.run_folder.records import Confusion
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.measure import logits_or_none
from ortlaunch.worker.evaluation.scores import (
    MOST_COUNTED_CLASSES,
    gather_uneven_values,
    import_torchmetrics_quietly,
)
from ortlaunch.worker.process_group.distributed import DistributedContext


class LabelSetScores:
    """Micro and macro F1, and the mean average precision."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        names = getattr(getattr(evaluated_model.plain.model, "config", None), "id2label", None)
        self._names = {**(names or {})}
        self.confusion: Confusion | None = None
        """Counts of each class at the end of the evaluation; None for too many classes."""
        self._class_count = 0
        self._logits = list[float]()
        self._labels = list[float]()

    def count_micro_batch(
        self, output: Any, labels_by_name: Mapping[str, torch.Tensor], is_counted: bool
    ) -> None:
        """Keep the logits and labels of a batch, (samples, classes); see MetricMeasure."""
        logits = logits_or_none(output)
        labels = labels_by_name.get("labels")
        if logits is None or labels is None or logits.shape != labels.shape:
            return
        # Also of a batch that does not count: all ranks must have the same metrics.
        self._class_count = logits.size(-1)
        if is_counted:
            self._logits += logits.flatten().tolist()
            self._labels += labels.flatten().tolist()

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the metrics by name (collective); none for a batch without classes."""
        if not self._class_count:
            return {}
        logits, labels = (
            torch.tensor(values, dtype=torch.float64).reshape(-1, self._class_count)
            for values in (
                gather_uneven_values(group, self._logits),
                gather_uneven_values(group, self._labels),
            )
        )
        if self._class_count <= MOST_COUNTED_CLASSES:
            is_predicted, is_labelled = logits > 0, labels > 0
            counts = [
                each.sum(0) for each in (is_predicted & is_labelled, is_labelled, is_predicted)
            ]
            self.confusion = Confusion(
                [str(self._names.get(number, number)) for number in range(self._class_count)],
                torch.stack(counts, 1).tolist(),
                are_label_sets=True,
            )
        functions = import_torchmetrics_quietly().functional.classification
        options = {"num_labels": self._class_count, "validate_args": False}
        predicted, labels = (logits > 0).long(), labels.long()
        class_f1 = functions.multilabel_f1_score(
            predicted, labels, average="none", zero_division=math.nan, **options
        )
        metrics = {
            "f1_micro": functions.multilabel_f1_score(
                predicted, labels, average="micro", **options
            ),
            "f1_macro": class_f1.nanmean(),
        }
        has_sample = labels.any(0)
        if has_sample.any():
            # torchmetrics takes probabilities as they are, and would change logits.
            metrics["mean_average_precision"] = functions.multilabel_average_precision(
                logits.sigmoid()[:, has_sample],
                labels[:, has_sample],
                num_labels=int(has_sample.sum()),
                validate_args=False,
            )
        return {name: float(value) for name, value in metrics.items()}

"""How right a model's classes and numbers are, over all ranks, by torchmetrics.

It is imported here alone, at a first evaluation with labels: that takes 0.4 s, and with matplotlib installed 0.8.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.evaluation.entities import Entities, are_tags
from ortlaunch.worker.evaluation.measure import logits_of
from ortlaunch.worker.process_group.distributed import DistributedContext


class Scores:
    """Of one evaluation, whose first batch tells of what kind they are."""

    def __init__(self, engine: TrainingEngine) -> None:
        names = getattr(getattr(engine.plain.model, "config", None), "id2label", None) or {}
        self._names = [
            names[number] for number in sorted(names)
        ]  # of the classes, where the model knows them
        self._kind: Classes | ValueScores | None = None

    def add(self, output: Any, labels_by_name: Mapping[str, torch.Tensor], counts: bool) -> None:
        """A batch; one that does not count only fills a rank's turn."""
        logits = logits_of(output)
        labels = labels_by_name.get("labels")
        if logits is None or labels is None:
            return
        numbers = labels.is_floating_point()
        if numbers and logits.numel() != labels.numel():
            return
        if not numbers and (logits.shape[:-1] != labels.shape or logits.size(-1) == 1):
            return
        if self._kind is None:
            self._kind = (
                ValueScores() if numbers else Classes(logits.size(-1), self._names, logits.device)
            )
        if counts:
            self._kind.add(logits, labels)

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """By their names in the table (collective); none where nothing could be right."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is nan, and a rank without samples
            return self._kind.read(group) if self._kind is not None else {}


class Classes:
    """Accuracy, the mean of the F1 of classes that were given or meant, and whole entities where classes are tags."""

    def __init__(self, classes: int, names: Sequence[str], device: torch.device) -> None:
        kinds = _torchmetrics().classification
        options = {"validate_args": False, "sync_on_compute": False}
        self._accuracy = kinds.MulticlassAccuracy(classes, average="micro", **options)
        # Each class as a label of its own: F1 of classes makes a table of classes by classes, 4 GB of 21,841.
        self._f1 = kinds.MultilabelF1Score(
            classes, average="none", zero_division=math.nan, **options
        )
        for metric in (self._accuracy, self._f1):
            metric.set_dtype(torch.float64).to(device)
        self._classes = classes
        self._names = names
        self._entities = Entities() if len(names) == classes and are_tags(names) else None

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Of (samples, classes) or (samples, words, classes)."""
        given = logits.argmax(-1)
        counted = labels != IGNORED
        if self._entities is not None and labels.dim() == 2:
            for row, meant, here in zip(given.cpu(), labels.cpu(), counted.cpu()):
                self._entities.add(self._tags(row[here]), self._tags(meant[here]))
        given = given[counted]
        meant = labels[counted]
        if len(meant):
            self._accuracy.update(given, meant)
            self._f1.update(
                functional.one_hot(given, self._classes), functional.one_hot(meant, self._classes)
            )

    def read(self, group: DistributedContext) -> dict[str, float]:
        found = {
            "classification_accuracy": float(_of_all_ranks(self._accuracy, group)),
            "f1_macro": float(_of_all_ranks(self._f1, group).nanmean()),
        }
        return found | (self._entities.read(group) if self._entities is not None else {})

    def _tags(self, numbers: torch.Tensor) -> list[str]:
        return [self._names[number] for number in numbers.tolist()]


class ValueScores:
    """Mean squared error and Pearson's correlation; torchmetrics' own sum over ranks is nan for a sample each."""

    def __init__(self) -> None:
        self._given = list[float]()
        self._meant = list[float]()

    def add(self, given: torch.Tensor, meant: torch.Tensor) -> None:
        self._given += given.flatten().tolist()
        self._meant += meant.flatten().tolist()

    def read(self, group: DistributedContext) -> dict[str, float]:
        counts = [int(count) for (count,) in group.gather_numbers([len(self._given)])]
        both = (_gathered(group, values, counts) for values in (self._given, self._meant))
        given, meant = (torch.tensor(values, dtype=torch.float64) for values in both)
        kinds = _torchmetrics().functional
        return {
            "mse": float(kinds.mean_squared_error(given, meant)),
            "pearson": float(kinds.pearson_corrcoef(given, meant)),
        }


def _gathered(group: DistributedContext, mine: list[float], counts: list[int]) -> list[float]:
    """Every rank's, of which it has so many."""
    ranks = group.gather_numbers(mine + [0.0] * (max(counts) - len(mine)))
    return [value for values, count in zip(ranks, counts) for value in values[:count]]


def _of_all_ranks(metric: Any, group: DistributedContext) -> Any:
    """A metric of what all ranks counted."""
    for name, mine in metric.metric_state.items():
        ranks = group.gather_numbers(mine.flatten().tolist())
        setattr(metric, name, torch.tensor(ranks, dtype=torch.float64).sum(0).reshape(mine.shape))
    return metric.compute()


def _torchmetrics() -> Any:
    logging.getLogger("matplotlib").setLevel(
        logging.ERROR
    )  # torchmetrics imports it, and it tells of a closed home
    import torchmetrics

    return torchmetrics

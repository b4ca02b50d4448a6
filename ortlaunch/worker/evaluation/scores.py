"""Metrics of predicted classes and values over all ranks, computed by torchmetrics.

Only this module imports torchmetrics, at the first evaluation with labels. The import takes 0.4 s,
or 0.8 s if matplotlib is installed.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ortlaunch.run_folder.records import Confusion
from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.evaluation.entities import Entities, are_tags
from ortlaunch.worker.evaluation.measure import logits_of
from ortlaunch.worker.process_group.distributed import DistributedContext

# Classes up to which the counts by predicted class are kept.
_MOST_CLASSES = 100


class Scores:
    """The scores of one evaluation, of classes or of values, depending on its first batch."""

    def __init__(self, engine: TrainingEngine) -> None:
        names = getattr(getattr(engine.plain.model, "config", None), "id2label", None) or {}
        self.confusion: Confusion | None = None
        """Of all ranks, after `read`; None where there are no classes, or too many."""
        # The names of the classes, if the model's config has them.
        self._names = [names[number] for number in sorted(names)]
        self._kind: Classes | ValueScores | None = None

    def add(self, output: Any, labels_by_name: Mapping[str, torch.Tensor], counts: bool) -> None:
        """Count a batch; with `counts` false it only fills a rank's turn."""
        logits = logits_of(output)
        labels = labels_by_name.get("labels")
        if logits is None or labels is None:
            return
        # Labels of a regression are floats.
        numbers = labels.is_floating_point()
        if numbers and logits.numel() != labels.numel():
            return
        if not numbers and (logits.shape[:-1] != labels.shape or logits.size(-1) == 1):
            return
        # Also for a batch that does not count: all ranks must have the same metrics in `read`.
        if self._kind is None:
            self._kind = (
                ValueScores() if numbers else Classes(logits.size(-1), self._names, logits.device)
            )
        if counts:
            self._kind.add(logits, labels)

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the scores by their names in the table (collective); none without labels."""
        with warnings.catch_warnings():
            # torchmetrics warns of nan and of a rank without samples.
            warnings.simplefilter("ignore")
            found = self._kind.read(group) if self._kind is not None else {}
        if isinstance(self._kind, Classes):
            self.confusion = self._kind.confusion(group)
        return found


class Classes:
    """Accuracy, macro F1, and the metrics of entities if the classes are tags.

    Macro F1 is the mean over those classes that are predicted or labelled.
    """

    def __init__(self, classes: int, names: Sequence[str], device: torch.device) -> None:
        kinds = _torchmetrics().classification
        options = {"validate_args": False, "sync_on_compute": False}
        self._accuracy = kinds.MulticlassAccuracy(classes, average="micro", **options)
        # Each class is a binary label: MulticlassF1Score would build a matrix of classes x classes,
        # which is 4 GB for 21,841 classes.
        self._f1 = kinds.MultilabelF1Score(
            classes, average="none", zero_division=math.nan, **options
        )
        for metric in (self._accuracy, self._f1):
            metric.set_dtype(torch.float64).to(device)
        self._classes = classes
        self._names = names
        # Counts by class and predicted class.
        self._counts = torch.zeros(classes**2 if classes <= _MOST_CLASSES else 0, dtype=torch.int64)
        self._entities = Entities() if len(names) == classes and are_tags(names) else None

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count logits of shape (samples, classes) or (samples, words, classes)."""
        given = logits.argmax(-1)
        counted = labels != IGNORED
        if self._entities is not None and labels.dim() == 2:
            for row, meant, here in zip(given.cpu(), labels.cpu(), counted.cpu()):
                self._entities.add(self._tags(row[here]), self._tags(meant[here]))
        given = given[counted]
        meant = labels[counted]
        if len(meant):
            if len(self._counts):
                pairs = (meant * self._classes + given).cpu()
                self._counts += torch.bincount(pairs, minlength=self._classes**2)
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

    def confusion(self, group: DistributedContext) -> Confusion | None:
        """Return the counts of all ranks by class (collective); None for too many classes."""
        if not len(self._counts):
            return None
        ranks = group.gather_numbers(self._counts.tolist())
        counts = torch.tensor(ranks).sum(0).reshape(self._classes, -1).long().tolist()
        return Confusion([*self._names] or [str(number) for number in range(self._classes)], counts)

    def _tags(self, numbers: torch.Tensor) -> list[str]:
        return [self._names[number] for number in numbers.tolist()]


class Transcripts:
    """Word error rate of what a model writes for recordings, as jiwer and `evaluate` define it."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._plain = engine.plain
        self._errors = _torchmetrics().text.WordErrorRate(sync_on_compute=False)
        # Nothing yet: else it warns on a rank that has no sample.
        self._errors.update([], [])
        # It warns of marks that are two things at once, as Whisper's end of text is.
        logging.getLogger("transformers.generation").setLevel(logging.ERROR)

    def add(self, output: Any, batch: Mapping[str, torch.Tensor], counts: bool) -> None:
        """Let the model write, in plain PyTorch; collective where ZeRO 3 has split it."""
        tokenizer, model = self._plain.tokenizer, self._plain.model
        if tokenizer is None or not hasattr(model, "generate"):
            return
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        # A few places are for the decoder's start.
        longest = min(labels.size(1) + 4, getattr(model.config, "max_target_positions", 1 << 20))
        # ZeRO 3 has split the weights, so that all ranks write as long as one does.
        split = hasattr(next(model.parameters()), "ds_id")
        given = model.generate(
            **inputs, max_length=longest, use_cache=True, do_sample=False, synced_gpus=split
        )
        meant = [row[row != IGNORED] for row in labels]
        if counts:
            texts = ([tokenizer.decode(row, skip_special_tokens=True) for row in rows]
                     for rows in (given, meant))  # fmt: skip
            self._errors.update(*texts)

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        rate = float(_of_all_ranks(self._errors, group))
        return {"word_error_rate": rate} if math.isfinite(rate) else {}


class ValueScores:
    """Mean squared error and Pearson's correlation."""

    # All values are gathered: torchmetrics' own reduction over ranks gives nan if each rank has one
    # sample.

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
    """Return the values of all ranks; `counts` are their numbers of values."""
    # A gathered tensor has one size on all ranks: fill with zeros, and cut them off.
    ranks = group.gather_numbers(mine + [0.0] * (max(counts) - len(mine)))
    return [value for values, count in zip(ranks, counts) for value in values[:count]]


def _of_all_ranks(metric: Any, group: DistributedContext) -> Any:
    """Compute a metric from the counts of all ranks."""
    for name, mine in metric.metric_state.items():
        ranks = group.gather_numbers(mine.flatten().tolist())
        setattr(metric, name, torch.tensor(ranks, dtype=torch.float64).sum(0).reshape(mine.shape))
    return metric.compute()


def _torchmetrics() -> Any:
    # torchmetrics imports matplotlib, which warns of a home folder that is not writable.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import torchmetrics

    return torchmetrics

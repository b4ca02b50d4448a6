"""Metrics of predicted classes and values over all ranks, computed by torchmetrics.

Only this module imports torchmetrics, for all, at the first evaluation with labels. The import takes 0.4 s,
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
from ortlaunch.worker.evaluation.entities import EntityCounts, are_classes_entity_tags
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.measure import SAMPLE_INDICES, logits_or_none
from ortlaunch.worker.process_group.distributed import DistributedContext

MOST_COUNTED_CLASSES = 100
"""Classes up to which the counts of each class are kept."""


class Scores:
    """The scores of one evaluation, of classes or of values, depending on its first batch."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        names = (
            getattr(getattr(evaluated_model.plain.model, "config", None), "id2label", None) or {}
        )
        self.confusion: Confusion | None = None
        """Of all ranks, at the end of the evaluation; None where there are no classes, or too many."""
        # The names of the classes, if the model's config has them.
        self._names = [names[class_index] for class_index in sorted(names)]
        self._measure: ClassScores | ValueScores | None = None

    def count_micro_batch(
        self, output: Any, labels_by_name: Mapping[str, torch.Tensor], is_counted: bool
    ) -> None:
        """Count a batch; with `is_counted` false it only fills a rank's turn."""
        logits = logits_or_none(output)
        labels = labels_by_name.get("labels")
        if logits is None or labels is None:
            return
        # Labels of a regression are floats.
        are_values = labels.is_floating_point()
        if are_values and logits.numel() != labels.numel():
            return
        if not are_values and (logits.shape[:-1] != labels.shape or logits.size(-1) == 1):
            return
        # Also for a batch that does not count: all ranks must have the same metrics.
        if self._measure is None:
            self._measure = (
                ValueScores()
                if are_values
                else ClassScores(logits.size(-1), self._names, logits.device)
            )
        if is_counted:
            self._measure.add(logits, labels)

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the scores by their names in the table (collective); none without labels."""
        with warnings.catch_warnings():
            # torchmetrics warns of nan and of a rank without samples.
            warnings.simplefilter("ignore")
            scores = self._measure.read(group) if self._measure is not None else {}
        if isinstance(self._measure, ClassScores):
            self.confusion = self._measure.gather_confusion_counts_or_none(group)
        return scores


class ClassScores:
    """Accuracy, macro F1, and the metrics of entities if the classes are tags.

    Macro F1 is the mean over those classes that are predicted or labelled.
    """

    def __init__(self, class_count: int, class_names: Sequence[str], device: torch.device) -> None:
        metric_classes = import_torchmetrics_quietly().classification
        options = {"validate_args": False, "sync_on_compute": False}
        self._accuracy = metric_classes.MulticlassAccuracy(class_count, average="micro", **options)
        # Each class is a binary label: MulticlassF1Score would build a matrix of classes x classes,
        # which is 4 GB for 21,841 classes.
        self._f1 = metric_classes.MultilabelF1Score(
            class_count, average="none", zero_division=math.nan, **options
        )
        for metric in (self._accuracy, self._f1):
            metric.set_dtype(torch.float64).to(device)
        self._classes = class_count
        self._names = class_names
        # Counts by class and predicted class.
        self._counts = torch.zeros(
            class_count**2 if class_count <= MOST_COUNTED_CLASSES else 0, dtype=torch.int64
        )
        self._entities = (
            EntityCounts(class_names)
            if len(class_names) == class_count and are_classes_entity_tags(class_names)
            else None
        )

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count logits of shape (samples, classes) or (samples, words, classes)."""
        predicted = logits.argmax(-1)
        is_labelled = labels != IGNORED
        if self._entities is not None and labels.dim() == 2:
            for row, labelled, row_mask in zip(predicted.cpu(), labels.cpu(), is_labelled.cpu()):
                self._entities.count_entities_of_row(
                    self._tag_names(row[row_mask]), self._tag_names(labelled[row_mask])
                )
        predicted = predicted[is_labelled]
        labelled = labels[is_labelled]
        if len(labelled):
            if len(self._counts):
                pairs = (labelled * self._classes + predicted).cpu()
                self._counts += torch.bincount(pairs, minlength=self._classes**2)
            self._accuracy.update(predicted, labelled)
            self._f1.update(
                functional.one_hot(predicted, self._classes),
                functional.one_hot(labelled, self._classes),
            )

    def read(self, group: DistributedContext) -> dict[str, float]:
        scores = {
            "classification_accuracy": float(
                _replace_state_by_sum_over_ranks_and_compute(self._accuracy, group)
            ),
            "f1_macro": float(
                _replace_state_by_sum_over_ranks_and_compute(self._f1, group).nanmean()
            ),
        }
        return scores | (
            self._entities.entity_metrics_over_ranks(group) if self._entities is not None else {}
        )

    def gather_confusion_counts_or_none(self, group: DistributedContext) -> Confusion | None:
        """Return the counts of all ranks by class (collective); None for too many classes."""
        if not len(self._counts):
            return None
        counts_by_rank = group.gather_numbers(self._counts.tolist())
        counts = torch.tensor(counts_by_rank).sum(0).reshape(self._classes, -1).long().tolist()
        # A choice among texts is no class that has a name.
        has_names = len(self._names) == self._classes
        numbers = [str(class_index) for class_index in range(self._classes)]
        return Confusion([*self._names] if has_names else numbers, counts)

    def _tag_names(self, class_indices: torch.Tensor) -> list[str]:
        return [self._names[class_index] for class_index in class_indices.tolist()]


class Transcripts:
    """Word error rate of what a model writes for recordings, as jiwer and `evaluate` define it."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        self._plain = evaluated_model.plain
        self._has_mesh = evaluated_model.group.mesh is not None
        self._errors = import_torchmetrics_quietly().text.WordErrorRate(sync_on_compute=False)
        # Nothing yet: else it warns on a rank that has no sample.
        self._errors.update([], [])
        # It warns of marks that are two things at once, as Whisper's end of text is.
        logging.getLogger("transformers.generation").setLevel(logging.ERROR)

    def count_micro_batch(
        self, output: Any, batch: Mapping[str, torch.Tensor], is_counted: bool
    ) -> None:
        """Let the model write, in plain PyTorch; collective where ZeRO 3 or FSDP2 has split it."""
        tokenizer = self._plain.tokenizer
        # A model that does not write has no `generate`.
        model: Any = self._plain.model
        if tokenizer is None or not hasattr(model, "generate"):
            return
        labels = batch["labels"]
        inputs = {
            name: value for name, value in batch.items() if name not in ("labels", SAMPLE_INDICES)
        }
        # A few places are for the decoder's start.
        max_length = min(labels.size(1) + 4, getattr(model.config, "max_target_positions", 1 << 20))
        # The weights are split, so that all ranks write as long as one does.
        is_split = self._has_mesh or hasattr(next(model.parameters()), "ds_id")
        written = model.generate(
            **inputs, max_length=max_length, use_cache=True, do_sample=False, synced_gpus=is_split
        )
        references = [row[row != IGNORED] for row in labels]
        if is_counted:
            texts = ([tokenizer.decode(row, skip_special_tokens=True) for row in rows]
                     for rows in (written, references))  # fmt: skip
            self._errors.update(*texts)

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        rate = float(_replace_state_by_sum_over_ranks_and_compute(self._errors, group))
        return {"word_error_rate": rate} if math.isfinite(rate) else {}


class ValueScores:
    """Mean squared error and Pearson's correlation."""

    # All values are gathered: torchmetrics' own reduction over ranks gives nan if each rank has one
    # sample.

    def __init__(self) -> None:
        self._predicted = list[float]()
        self._labelled = list[float]()

    def add(self, predicted: torch.Tensor, labelled: torch.Tensor) -> None:
        self._predicted += predicted.flatten().tolist()
        self._labelled += labelled.flatten().tolist()

    def read(self, group: DistributedContext) -> dict[str, float]:
        gathered_values = (
            gather_uneven_values(group, values) for values in (self._predicted, self._labelled)
        )
        predicted, labelled = (
            torch.tensor(values, dtype=torch.float64) for values in gathered_values
        )
        metric_functions = import_torchmetrics_quietly().functional
        return {
            "mse": float(metric_functions.mean_squared_error(predicted, labelled)),
            "pearson": float(metric_functions.pearson_corrcoef(predicted, labelled)),
        }


def gather_uneven_values(group: DistributedContext, rank_values: list[float]) -> list[float]:
    """Return the values of all ranks, of which each may have another number (collective)."""
    count_by_rank = [int(count) for (count,) in group.gather_numbers([len(rank_values)])]
    # A gathered tensor has one size on all ranks: fill with zeros, and cut them off.
    values_by_rank = group.gather_numbers(
        rank_values + [0.0] * (max(count_by_rank) - len(rank_values))
    )
    return [
        value for values, count in zip(values_by_rank, count_by_rank) for value in values[:count]
    ]


def _replace_state_by_sum_over_ranks_and_compute(metric: Any, group: DistributedContext) -> Any:
    for name, rank_state in metric.metric_state.items():
        states_by_rank = group.gather_numbers(rank_state.flatten().tolist())
        setattr(
            metric,
            name,
            torch.tensor(states_by_rank, dtype=torch.float64).sum(0).reshape(rank_state.shape),
        )
    return metric.compute()


def import_torchmetrics_quietly() -> Any:
    """Return the module torchmetrics, which is imported at the first evaluation that needs it."""
    # torchmetrics imports matplotlib, which warns of a home folder that is not writable.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import torchmetrics

    return torchmetrics

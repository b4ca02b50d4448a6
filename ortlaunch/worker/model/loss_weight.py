"""The weight of a micro batch in a step's loss: its samples, its labels, or a value of the data.

A model returns the mean over its own micro batch. If micro batches have unequal weights, the mean
of these means is not the mean over the global batch. The factors of this module correct loss and
gradients.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import IGNORED, Batches
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.model.chunked_head import predicts_next_token
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.tensor_batch import TensorBatch

_TWO_MEANS = DataError(
    "the loss of task pretraining is a mean over masked words and one over sentence pairs, and "
    "samples of data.train differ in how many words are masked: mask the same number in each, "
    "or set the weights of both means: train.loss_weight=labels or train.loss_weight=samples"
)


class LossWeight:
    """`train.loss_weight` of a recipe, or its default for the task."""

    def __init__(self, recipe: Recipe, model: LossModule) -> None:
        traits = recipe.model.traits
        self.is_declared = recipe.train.loss_weight is not None
        self.by = recipe.train.loss_weight or ("samples" if traits.is_own else "labels")
        self.shifted = predicts_next_token(model)
        # Our own corpus may have documents shorter than a sample: there the labels are the weight,
        # as the recipe's field describes.
        self.two_means = traits.pairs and recipe.data.is_custom and not self.is_declared
        self.varies = recipe.data.is_custom and self.by != "samples"
        self.key = None if self.by in ("samples", "labels") else self.by
        # The steps of a LightningModule get the whole batch.
        self.is_key_removed = (
            not traits.wrapper
            and self.key
            and self.key not in inspect.signature(model.model.forward).parameters
        )

    def micro_batches_with_loss_factors(
        self, batches: Batches, step_index: int, group: DistributedContext
    ) -> Iterator[tuple[TensorBatch, float]]:
        """Yield this rank's micro batches of a step, each with the factor for its loss.

        The factor is exactly 1 if all weights are equal. If weights may differ, this call is
        collective and reads all micro batches first.

        Args:
            batches: the run's batches.
            step_index: the number of the step, from 0.
            group: the ranks of the run.

        Raises:
            DataError: a weight is negative or not finite, or all weights of the step sum to 0.
        """
        pass_indices = range(batches.batch.accumulation_steps)
        if not (
            self.varies or (getattr(batches.samples, "varies", False) and self.by != "samples")
        ):
            yield from (
                (batches.read_micro_batch_and_count_tokens(step_index, pass_index, group.rank), 1.0)
                for pass_index in pass_indices
            )
            return
        micro_batches = [
            batches.read_micro_batch_and_count_tokens(step_index, pass_index, group.rank)
            for pass_index in pass_indices
        ]
        rank_weights = [
            self.weight_of_micro_batch(
                batch, batches.sample_indices_of_micro_batch(step_index, i, group.rank)
            )
            for i, batch in enumerate(micro_batches)
        ]
        weights = [weight for of_rank in group.gather_numbers(rank_weights) for weight in of_rank]
        # fsum is exact, so that equal weights give a factor of exactly 1.
        total = math.fsum(weights)
        if not total:
            raise self._no_weight_error(batches, step_index)
        if self.two_means and len(set(weights)) > 1:
            raise _TWO_MEANS
        yield from (
            (batch, weight * len(weights) / total)
            for batch, weight in zip(micro_batches, rank_weights)
        )

    def _no_weight_error(self, batches: Batches, step_index: int) -> DataError:
        samples = ", ".join(map(str, batches.sample_indices_of_step(step_index)))
        return DataError(
            f"step {step_index + 1}: no sample counts: the sum of "
            f"{'counted labels' if self.key is None else repr(self.key)} is 0 in samples {samples}"
        )

    def weight_of_micro_batch(self, batch: TensorBatch, sample_indices: Sequence[int]) -> float:
        """Return the weight of a micro batch.

        `sample_indices_of_micro_batch` are its indices, for the error message.
        """
        if self.by == "labels" and ("labels" in batch or self.is_declared):
            return float(self._count_of_labels_in_loss(self._require_batch_value(batch, "labels")))
        if self.key is None:
            return float(len(sample_indices))
        sample_weights = (
            self._require_batch_value(batch, self.key)
            .double()
            .reshape(len(sample_indices), -1)
            .sum(1)
        )
        bad_index = next(
            (i for i, weight in enumerate(sample_weights.tolist()) if not 0 <= weight < math.inf),
            None,
        )
        if bad_index is not None:
            raise DataError(
                f"train.loss_weight: {self.key!r} of sample {sample_indices[bad_index]} is "
                f"{float(sample_weights[bad_index]):g}; a weight is 0 or more"
            )
        return math.fsum(sample_weights.tolist())

    def batch_without_weight_key_with_counted_label(self, batch: TensorBatch) -> TensorBatch:
        """Return a batch for the model: without our own key, and with at least one label."""
        if self.is_key_removed:
            batch = {name: value for name, value in batch.items() if name != self.key}
        labels = batch.get("labels")
        if self.by != "labels" or labels is None or self._count_of_labels_in_loss(labels):
            return batch
        # The mean over no label is nan, and 0 times nan is nan, too. The weight of this micro batch
        # is 0, so that the added label does not count.
        labels = labels.clone()
        labels.view(len(labels), -1)[0, -1] = 0
        return {**batch, "labels": labels}

    def _count_of_labels_in_loss(self, labels: torch.Tensor) -> int:
        # Labels of a regression: all of them count.
        if labels.is_floating_point():
            return int(labels.numel())
        counted = labels[..., 1 if self.shifted and labels.dim() > 1 else 0 :] != IGNORED
        return int(torch.count_nonzero(counted))

    def _require_batch_value(self, batch: TensorBatch, key: str) -> torch.Tensor:
        if key not in batch:
            raise DataError(
                f"train.loss_weight: got {self.by}, and a batch has no {key!r}; "
                f"it has {', '.join(batch)}"
            )
        return batch[key]

"""What a micro batch counts in a step's loss: its samples, its counted labels, or a number that the data carry.

A model returns the mean over its own micro batch. Where micro batches count unequally, the mean of such means is not
the mean over the global batch; the factors made here turn loss and gradients into that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import IGNORED, Batches
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.model.chunked_head import shifts
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext

Batch = dict[str, torch.Tensor]

_TWO_MEANS = DataError(
    "the loss of task pretraining is a mean over masked words and one over sentence pairs, and samples of data.train "
    "differ in how many words are masked: mask as many in each, or say what both means are weighted by: "
    "train.loss_weight=labels or train.loss_weight=samples"
)


class LossWeight:
    """`train.loss_weight` of a recipe, or what stands for it where the recipe does not say."""

    def __init__(self, recipe: Recipe, model: LossModule) -> None:
        traits = recipe.model.traits
        self.declared = recipe.train.loss_weight is not None
        self.by = recipe.train.loss_weight or ("samples" if traits.is_own else "labels")
        self.shifted = shifts(model)
        # A corpus of ours may have documents shorter than a sample: the words decide then, as said at the field.
        self.two_means = traits.pairs and recipe.data.is_custom and not self.declared
        self.varies = recipe.data.is_custom and self.by != "samples"
        self.key = None if self.by in ("samples", "labels") else self.by
        self.taken_out = (
            self.key and self.key not in inspect.signature(model.model.forward).parameters
        )

    def passes(
        self, batches: Batches, step: int, group: DistributedContext
    ) -> Iterator[tuple[Batch, float]]:
        """This rank's micro batches of a step (from 0), each with the factor on its loss.

        Where all count the same the factor is exactly 1. Collective, and all micro batches are read first, where
        weights may differ.

        Raises:
            DataError: a weight is negative or not finite, or nothing counts in the whole step.
        """
        numbers = range(batches.batch.accumulation_steps)
        if not (
            self.varies or (getattr(batches.samples, "varies", False) and self.by != "samples")
        ):
            yield from ((batches.micro_batch(step, number, group.rank), 1.0) for number in numbers)
            return
        taken = [batches.micro_batch(step, number, group.rank) for number in numbers]
        mine = [
            self.of(batch, batches.indices(step, i, group.rank)) for i, batch in enumerate(taken)
        ]
        weights = [weight for of_rank in group.gather_numbers(mine) for weight in of_rank]
        total = math.fsum(weights)  # exact, so that equal weights give exactly 1 below
        if not total:
            raise self._nothing(batches, step)
        if self.two_means and len(set(weights)) > 1:
            raise _TWO_MEANS
        yield from ((batch, weight * len(weights) / total) for batch, weight in zip(taken, mine))

    def _nothing(self, batches: Batches, step: int) -> DataError:
        samples = ", ".join(map(str, batches.indices_of_step(step)))
        return DataError(
            f"step {step + 1}: nothing counts: the sum of {self._named} is 0 in samples {samples}"
        )

    def of(self, batch: Batch, samples: Sequence[int]) -> float:
        """What a micro batch counts; `samples` are its indices, for the error."""
        if self.by == "labels" and ("labels" in batch or self.declared):
            return float(self._labels(self._value(batch, "labels")))
        if self.key is None:
            return float(len(samples))
        each = self._value(batch, self.key).double().reshape(len(samples), -1).sum(1)
        bad = next(
            (i for i, weight in enumerate(each.tolist()) if not 0 <= weight < math.inf), None
        )
        if bad is not None:
            raise DataError(
                f"train.loss_weight: {self.key!r} of sample {samples[bad]} is {float(each[bad]):g}; a weight is 0 or "
                "more"
            )
        return math.fsum(each.tolist())

    def prepared(self, batch: Batch) -> Batch:
        """A batch as the model takes it: without the key that is for us alone, and with a label at least.

        The mean over no label is nan, and so would be 0 times that: the added one counts nothing.
        """
        if self.taken_out:
            batch = {name: value for name, value in batch.items() if name != self.key}
        labels = batch.get("labels")
        if self.by != "labels" or labels is None or self._labels(labels):
            return batch
        labels = labels.clone()
        labels.view(len(labels), -1)[0, -1] = 0
        return {**batch, "labels": labels}

    def _labels(self, labels: torch.Tensor) -> int:
        """How many are counted."""
        if labels.is_floating_point():  # a regression's: none is left out
            return int(labels.numel())
        counted = labels[..., 1 if self.shifted and labels.dim() > 1 else 0 :] != IGNORED
        return int(torch.count_nonzero(counted))

    def _value(self, batch: Batch, key: str) -> torch.Tensor:
        if key not in batch:
            raise DataError(
                f"train.loss_weight: got {self.by}, and a batch has no {key!r}; it has {', '.join(batch)}"
            )
        return batch[key]

    @property
    def _named(self) -> str:
        return "counted labels" if self.key is None else repr(self.key)

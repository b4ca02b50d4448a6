"""What a rank sees at a step: a function of seed and step, never of the number of ranks."""

from __future__ import annotations

import itertools

import torch

from ortlaunch.plan import BatchPlan
from ortlaunch.worker.data.left_out import LeftOut
from ortlaunch.worker.data.mixture import Mixture
from ortlaunch.worker.data.order import Order
from ortlaunch.worker.data.samples import Samples, collate


class Batches:
    """Micro batches by step; the order of samples depends on the seed alone."""

    def __init__(self, samples: Samples, batch: BatchPlan, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed
        self.left_out = LeftOut()
        self._step, self._seen = 0, 0
        self.order = samples.order(seed) if isinstance(samples, Mixture) else Order(len(samples), seed)

    def go_on(self, step: int, seen: int) -> None:
        """Step `step` follows on `seen` samples, whatever the global batch was before it."""
        self._step, self._seen = step, seen

    def seen(self, step: int) -> int:
        """Samples that the steps before `step` (from 0) took, with those that were left out before one they took."""
        taken = (step - self._step) * self.batch.global_samples
        return self.left_out.place(self._seen, taken - 1) + 1 if taken else self._seen

    def stretch(self, step: int) -> tuple[int, int]:
        """Where the samples of step `step` (from 0) are in the order of all epochs: first, and after the last."""
        return self.left_out.place(self._seen, (step - self._step) * self.batch.global_samples), self.seen(step + 1)

    def holds(self, places: list[int], samples: list[int]) -> bool:
        """Whether the places from the first to before the second have all of these samples."""
        return {index for index, _ in self.order.at(list(range(*places)))} >= set(samples)

    def micro_batch(self, step: int, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
        """What `rank` takes in pass `accumulation` of step `step` (both from 0); tensors are (micro_samples, ...)."""
        places = self._places(step, accumulation, rank)
        return collate([self.samples.sample(index, epoch) for index, epoch in places])

    def indices(self, step: int, accumulation: int, rank: int) -> list[int]:
        """Which samples of the data set `micro_batch` takes."""
        return [index for index, _ in self._places(step, accumulation, rank)]

    def indices_of_step(self, step: int) -> list[int]:
        """Those of all passes and ranks."""
        passes = itertools.product(range(self.batch.accumulation_steps), range(self.batch.data_parallel_ranks))
        return [index for number, rank in passes for index in self.indices(step, number, rank)]

    def _places(self, step: int, accumulation: int, rank: int) -> list[tuple[int, int]]:
        """(index, epoch) of each sample."""
        b = self.batch
        first = (step - self._step) * b.global_samples + (accumulation * b.data_parallel_ranks + rank) * b.micro_samples
        numbers = range(first, first + b.micro_samples)
        return self.order.at([self.left_out.place(self._seen, number) for number in numbers])

"""What a rank sees at a step: a function of seed and step, never of the number of ranks."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ortlaunch.plan import BatchPlan
from ortlaunch.worker.data.ahead import Ahead, Places, Reader, seed_sample
from ortlaunch.worker.data.left_out import LeftOut
from ortlaunch.worker.data.mixture import Mixture
from ortlaunch.worker.data.order import Order
from ortlaunch.worker.data.samples import Samples, Stack, collate, cut_padding


class Batches:
    """Micro batches by step; the order of samples depends on the seed alone."""

    def __init__(
        self,
        samples: Samples,
        batch: BatchPlan,
        seed: int,
        buckets: Sequence[int] = (),
        stack: Stack = collate,
    ) -> None:
        """buckets: lengths that padded samples are cut to, a step's samples being dealt out by theirs.

        stack: samples -> a batch.
        """
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.buckets = buckets
        self._stack = stack
        self._dealt: tuple[int, list[tuple[int, int]]] | None = None
        self._ahead: tuple[int, Ahead] | None = None  # of a rank
        self.left_out = LeftOut()
        self._step = 0
        self._seen = 0
        self.order = (
            samples.order(seed) if isinstance(samples, Mixture) else Order(len(samples), seed)
        )

    def go_on(self, step: int, seen: int) -> None:
        """Step `step` follows on `seen` samples, whatever the global batch was before it."""
        self._step = step
        self._seen = seen

    def seen(self, step: int) -> int:
        """Samples that the steps before `step` (from 0) took, with those that were left out before one they took."""
        taken = (step - self._step) * self.batch.global_samples
        return self.left_out.place(self._seen, taken - 1) + 1 if taken else self._seen

    def stretch(self, step: int) -> tuple[int, int]:
        """Where the samples of step `step` (from 0) are in the order of all epochs: first, and after the last."""
        return self.left_out.place(
            self._seen, (step - self._step) * self.batch.global_samples
        ), self.seen(step + 1)

    def holds(self, places: list[int], samples: list[int]) -> bool:
        """Whether the places from the first to before the second have all of these samples."""
        return {index for index, _ in self.order.at(list(range(*places)))} >= set(samples)

    def micro_batch(self, step: int, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
        """What `rank` takes in pass `accumulation` of step `step` (both from 0); tensors are (micro_samples, ...)."""
        if self._ahead is not None and self._ahead[0] == rank:
            return self._ahead[1].take(step, accumulation)
        return self._read(self._places(step, accumulation, rank))

    @contextlib.contextmanager
    def read_ahead(self, rank: int, reader: Reader) -> Iterator[None]:
        """While open, this rank's micro batches are read before they are asked for; nothing may change the order."""
        if reader.workers is None:
            yield
            return
        read = self._read_drawn if reader.workers else self._read
        ahead = Ahead(
            read,
            lambda step, number: self._places(step, number, rank),
            self.batch.accumulation_steps,
            reader,
        )
        self._ahead = rank, ahead
        try:
            yield
        finally:
            self._ahead = None
            ahead.close()

    def _read(self, places: Places) -> dict[str, torch.Tensor]:
        whole = getattr(self.samples, "batch", None)
        if whole is not None:
            return self._cut(whole(places))
        return self.stacked([self.samples.sample(index, epoch) for index, epoch in places])

    def _read_drawn(self, places: Places) -> dict[str, torch.Tensor]:
        """In a process of its own, whose random numbers nobody else draws."""
        taken = []
        for index, epoch in places:
            seed_sample(self.seed, index, epoch)
            taken.append(self.samples.sample(index, epoch))
        return self.stacked(taken)

    def stacked(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """A batch of these samples, as the model takes it."""
        return self._cut(self._stack(samples))

    def _cut(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return cut_padding(batch, self.buckets) if self.buckets else batch

    def indices(self, step: int, accumulation: int, rank: int) -> list[int]:
        """Which samples of the data set `micro_batch` takes."""
        return [index for index, _ in self._places(step, accumulation, rank)]

    def indices_of_step(self, step: int) -> list[int]:
        """Those of all passes and ranks."""
        passes = itertools.product(
            range(self.batch.accumulation_steps), range(self.batch.data_parallel_ranks)
        )
        return [index for number, rank in passes for index in self.indices(step, number, rank)]

    def _places(self, step: int, accumulation: int, rank: int) -> list[tuple[int, int]]:
        """(index, epoch) of each sample."""
        b = self.batch
        within = (accumulation * b.data_parallel_ranks + rank) * b.micro_samples
        first = (step - self._step) * b.global_samples
        if self.buckets:
            return self._by_length(first, b.global_samples)[within : within + b.micro_samples]
        return self._at(range(first + within, first + within + b.micro_samples))

    def _at(self, numbers: range) -> list[tuple[int, int]]:
        return self.order.at([self.left_out.place(self._seen, number) for number in numbers])

    def _by_length(self, first: int, count: int) -> list[tuple[int, int]]:
        """Of a whole step, the shortest first; those of one bucket as they come."""
        place = self.left_out.place(self._seen, first)
        if self._dealt is None or self._dealt[0] != place:
            found = self._at(range(first, first + count))
            padded: Any = self.samples
            buckets = [bisect.bisect_left(self.buckets, padded.size(index)) for index, _ in found]
            self._dealt = place, [found[i] for i in sorted(range(count), key=buckets.__getitem__)]
        return self._dealt[1]

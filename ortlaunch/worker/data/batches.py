"""The samples of each step: a function of seed and step, independent of the number of ranks."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data.ahead import Ahead, Places, Reader
from ortlaunch.worker.data.left_out import LeftOut
from ortlaunch.worker.data.mixture import streams_of
from ortlaunch.worker.data.order import Order
from ortlaunch.worker.data.own import OwnSamples, restored_generators, seed_sample
from ortlaunch.worker.data.samples import Samples, Stack, collate, cut_padding
from ortlaunch.worker.data.streams.writer import Position


class TokenCount(NamedTuple):
    """Tokens of micro batches."""

    tokens: int
    """Without padding."""
    padding: int

    def with_batch(self, batch: Mapping[str, torch.Tensor]) -> TokenCount:
        """Return the count with those of a batch; one without `input_ids` has none."""
        places = batch.get("input_ids")
        if places is None:
            return self
        mask = batch.get("attention_mask")
        is_padded = mask is not None and mask.shape == places.shape
        tokens = int(mask.count_nonzero()) if mask is not None and is_padded else places.numel()
        return TokenCount(self.tokens + tokens, self.padding + places.numel() - tokens)

    def since(self, earlier: TokenCount) -> TokenCount:
        """Return the count without an earlier one."""
        return TokenCount(self.tokens - earlier.tokens, self.padding - earlier.padding)


class Batches:
    """The micro batches of each step; the order of samples depends on the seed alone."""

    def __init__(
        self,
        samples: Samples,
        batch: BatchPlan,
        seed: int,
        buckets: Sequence[int] = (),
        stack: Stack = collate,
    ) -> None:
        """Prepare the order of samples.

        Args:
            samples: the data set.
            batch: the batch sizes of the plan.
            seed: the seed of the order.
            buckets: lengths, ascending, that padded samples are cut to; the samples of a step are
                then distributed to micro batches by length.
            stack: makes a batch of samples.
        """
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.buckets = buckets
        self._stack = stack
        self._are_own = any(
            isinstance(getattr(part, "whole", part), OwnSamples)
            for part in getattr(samples, "parts", [samples])
        )
        # The samples of the latest step, sorted by length, under the step's first place.
        self._dealt: tuple[int, list[tuple[int, int]]] | None = None
        # A rank, and the reader of its micro batches.
        self._ahead: tuple[int, Ahead] | None = None
        self.left_out = LeftOut()
        self.tokens = TokenCount(0, 0)
        """Of all micro batches that `micro_batch` has returned."""
        # The step from which the present batch size counts, and the samples consumed before it.
        self._step = 0
        self._first_place = 0
        self.streams = streams_of(samples)
        # Only some samples have an order of their own.
        own: Any = getattr(samples, "order", None)
        self.order: Any = own(seed) if own else Order(len(samples), seed)
        self.passed(0)

    def go_on(self, step: int, seen: int) -> None:
        """Let step `step` begin after `seen` places, whatever the batch size was before it."""
        self._step = step
        self._first_place = seen

    def passed(self, seen: int) -> list[Position]:
        """Release streamed samples before a place; return the position of each streamed source."""
        if not self.streams:
            return []
        found: list[Position] = self.order.passed(seen, 2 * self.batch.global_samples)
        return found

    def seek(self, positions: Sequence[Sequence[int]]) -> None:
        """Let each streamed source begin at a position of `passed`."""
        for stream, position in zip(self.streams, positions):
            stream.seek(position)

    def close(self) -> None:
        """End the tokenizing of streamed sources."""
        for stream in self.streams:
            stream.close()

    def epoch(self, seen: int) -> float:
        """Return the passes over the data after `seen` places; of streams, over the files."""
        return self.streams[0].epoch if self.streams else round(seen / len(self.samples), 4)

    def places_passed(self, step: int) -> int:
        """Return how many places of the order the steps before `step` (from 0) have passed.

        Skipped places before the last used one count; skipped places after it do not.
        """
        taken = (step - self._step) * self.batch.global_samples
        return self.left_out.place(self._first_place, taken - 1) + 1 if taken else self._first_place

    def completes(self, step: int, every: float | None) -> bool:
        """Return whether step `step` (from 1) completes a further `every` passes over the data."""
        if every is None:
            return False
        span = every * len(self.samples)
        # Rounded, so that an error of the division does not move the interval by a step.
        before, after = (
            math.floor(round(self.places_passed(at) / span, 9)) for at in (step - 1, step)
        )
        return after > before

    def stretch(self, step: int) -> tuple[int, int]:
        """Return the places [first, after) of step `step` (from 0) in the order of all epochs."""
        return self.left_out.place(
            self._first_place, (step - self._step) * self.batch.global_samples
        ), self.places_passed(step + 1)

    def holds(self, places: list[int], samples: list[int]) -> bool:
        """Return whether the places [first, after) include all of these samples."""
        return {index for index, _ in self.order.at(list(range(*places)))} >= set(samples)

    def micro_batch(self, step: int, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
        """Return the micro batch of a rank; tensors are (micro_samples, ...).

        Args:
            step: the step, from 0.
            accumulation: the pass of gradient accumulation within the step, from 0.
            rank: the data-parallel rank.
        """
        batch = (
            self._ahead[1].batch(step, accumulation)
            if self._ahead is not None and self._ahead[0] == rank
            else self._read(self._places(step, accumulation, rank))
        )
        self.tokens = self.tokens.with_batch(batch)
        return batch

    @contextlib.contextmanager
    def read_ahead(self, rank: int, reader: Reader) -> Iterator[None]:
        """Read this rank's micro batches ahead while the context is open.

        The order of samples must not change meanwhile.
        """
        if reader.workers is None:
            yield
            return
        ahead = Ahead(
            self._read,
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
        # Some data sets make a whole batch faster than its samples one by one.
        whole = getattr(self.samples, "batch", None)
        return self._cut(whole(places)) if whole else self.read(self.samples, places)

    def read(self, samples: Samples, places: Places) -> dict[str, torch.Tensor]:
        """Return the batch of these (index, epoch) of samples: the training's, or others.

        The user's own samples are read with random generators seeded for each of them, and leave
        the training's random numbers as they were.
        """
        if not self._are_own:
            return self.stacked([samples.sample(index, epoch) for index, epoch in places])
        with restored_generators():
            taken = []
            for index, epoch in places:
                seed_sample(self.seed, index, epoch)
                taken.append(samples.sample(index, epoch))
            return self.stacked(taken)

    def stacked(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """Return a batch of these samples in the form that the model accepts."""
        return self._cut(self._stack(samples))

    def _cut(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return cut_padding(batch, self.buckets) if self.buckets else batch

    def indices(self, step: int, accumulation: int, rank: int) -> list[int]:
        """Return the indices of the samples of `micro_batch`."""
        return [index for index, _ in self._places(step, accumulation, rank)]

    def indices_of_step(self, step: int) -> list[int]:
        """Return the indices of the samples of a step, over all passes and ranks."""
        passes = itertools.product(
            range(self.batch.accumulation_steps), range(self.batch.data_parallel_ranks)
        )
        return [index for number, rank in passes for index in self.indices(step, number, rank)]

    def _places(self, step: int, accumulation: int, rank: int) -> list[tuple[int, int]]:
        """Return (index, epoch) of each sample."""
        b = self.batch
        # Within a step the first passes of all ranks come first, then the second passes.
        within = (accumulation * b.data_parallel_ranks + rank) * b.micro_samples
        first = (step - self._step) * b.global_samples
        if self.buckets:
            return self._by_length(first, b.global_samples)[within : within + b.micro_samples]
        return self._at(range(first + within, first + within + b.micro_samples))

    def _at(self, numbers: range) -> list[tuple[int, int]]:
        places = [self.left_out.place(self._first_place, number) for number in numbers]
        found: list[tuple[int, int]] = self.order.at(places)
        return found

    def _by_length(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the samples of a whole step, sorted by bucket; within a bucket the order stays."""
        # The whole step is sorted, so that any number of ranks gets the same micro batches.
        place = self.left_out.place(self._first_place, first)
        if self._dealt is None or self._dealt[0] != place:
            found = self._at(range(first, first + count))
            padded: Any = self.samples
            buckets = [bisect.bisect_left(self.buckets, padded.size(index)) for index, _ in found]
            self._dealt = place, [found[i] for i in sorted(range(count), key=buckets.__getitem__)]
        return self._dealt[1]

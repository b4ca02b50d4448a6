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
from ortlaunch.worker.data.mixture import streamed_sources_of_samples
from ortlaunch.worker.data.order import SampleEpoch, SampleOrder
from ortlaunch.worker.data.read_ahead import BatchReadAhead, MicroBatchIndex, ReadAheadSettings
from ortlaunch.worker.data.samples import (
    Samples,
    Stack,
    collate,
    cut_padding_to_shortest_fitting_bucket,
)
from ortlaunch.worker.data.skipped_positions import SkippedPositions
from ortlaunch.worker.data.streams.writer import Position
from ortlaunch.worker.data.user_data import (
    UserSamples,
    restore_cpu_generators_after,
    seed_cpu_generators_for_sample,
)


class TokenCount(NamedTuple):
    """Tokens of micro batches."""

    tokens: int
    """Without padding."""
    padding: int

    def plus_batch_tokens_and_padding(self, batch: Mapping[str, torch.Tensor]) -> TokenCount:
        """Return the count with those of a batch; one without `input_ids` has none."""
        token_ids = batch.get("input_ids")
        if token_ids is None:
            return self
        mask = batch.get("attention_mask")
        is_padded = mask is not None and mask.shape == token_ids.shape
        tokens = int(mask.count_nonzero()) if mask is not None and is_padded else token_ids.numel()
        return TokenCount(self.tokens + tokens, self.padding + token_ids.numel() - tokens)

    def difference_from_earlier(self, earlier: TokenCount) -> TokenCount:
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
        self._are_user_samples = any(
            isinstance(getattr(part, "whole", part), UserSamples)
            for part in getattr(samples, "parts", [samples])
        )
        # The samples of the latest step, sorted by length, under the step's first place.
        self._sorted_step: tuple[int, list[SampleEpoch]] | None = None
        # A rank, and the reader of its micro batches.
        self._ahead: tuple[int, BatchReadAhead] | None = None
        self.left_out = SkippedPositions()
        self.tokens = TokenCount(0, 0)
        """Of all micro batches that `micro_batch` has returned."""
        # The step from which the present batch size counts, and the samples consumed before it.
        self._step = 0
        self._first_position = 0
        self.streams = streamed_sources_of_samples(samples)
        # Only some samples have an order of their own.
        own_order: Any = getattr(samples, "order", None)
        self.order: Any = own_order(seed) if own_order else SampleOrder(len(samples), seed)
        self.release_streamed_samples_and_return_positions(0)

    def begin_step_after_positions(self, step_index: int, positions_seen: int) -> None:
        """Let step `step_index` begin after `positions_seen` places, whatever the batch size was before it."""
        self._step = step_index
        self._first_position = positions_seen

    def release_streamed_samples_and_return_positions(self, order_position: int) -> list[Position]:
        """Release streamed samples before a place; return the position of each streamed source."""
        if not self.streams:
            return []
        stream_positions: list[Position] = self.order.passed(
            order_position, 2 * self.batch.global_samples
        )
        return stream_positions

    def seek_streams(self, positions: Sequence[Sequence[int]]) -> None:
        """Let each streamed source begin at a position of `passed`."""
        for stream, position in zip(self.streams, positions):
            stream.restart_at_recorded_position_unless_there(position)

    def close_streams(self) -> None:
        """End the tokenizing of streamed sources."""
        for stream in self.streams:
            stream.close()

    def passes_over_data_after(self, positions_seen: int) -> float:
        """Return the passes over the data after `positions_seen` places; of streams, over the files."""
        return (
            self.streams[0].epoch if self.streams else round(positions_seen / len(self.samples), 4)
        )

    def positions_before_step(self, step_index: int) -> int:
        """Return how many places of the order the steps before `step_index` (from 0) have passed.

        Skipped places before the last used one count; skipped places after it do not.
        """
        samples_of_steps = (step_index - self._step) * self.batch.global_samples
        return (
            self.left_out.position_of_unskipped_sample(self._first_position, samples_of_steps - 1)
            + 1
            if samples_of_steps
            else self._first_position
        )

    def does_step_complete_interval(self, step_number: int, every_passes: float | None) -> bool:
        """Return whether step `step_number` (from 1) completes a further `every_passes` passes over the data."""
        if every_passes is None:
            return False
        interval_samples = every_passes * len(self.samples)
        # Rounded, so that an error of the division does not move the interval by a step.
        intervals_before, intervals_after = (
            math.floor(round(self.positions_before_step(step_count) / interval_samples, 9))
            for step_count in (step_number - 1, step_number)
        )
        return intervals_after > intervals_before

    def position_range_of_step(self, step_index: int) -> range:
        """Return the places of step `step_index` (from 0) in the order of all epochs."""
        first_position = self.left_out.position_of_unskipped_sample(
            self._first_position, (step_index - self._step) * self.batch.global_samples
        )
        return range(first_position, self.positions_before_step(step_index + 1))

    def are_samples_in_position_range(
        self, position_range: range, sample_indices: list[int]
    ) -> bool:
        """Return whether these places include all of these samples."""
        return {
            sample_epoch.sample_index
            for sample_epoch in self.order.sample_epochs_at(list(position_range))
        } >= set(sample_indices)

    def read_micro_batch_and_count_tokens(
        self, step_index: int, pass_index: int, rank: int
    ) -> dict[str, torch.Tensor]:
        """Return the micro batch of a rank; tensors are (micro_samples, ...).

        Args:
            step_index: the step, from 0.
            pass_index: the pass of gradient accumulation within the step, from 0.
            rank: the data-parallel rank.
        """
        # A row of the profile of `log.profile_steps`.
        with torch.profiler.record_function("reading"):
            batch = (
                self._ahead[1].take_next_batch_or_repeat_last(
                    MicroBatchIndex(step_index, pass_index)
                )
                if self._ahead is not None and self._ahead[0] == rank
                else self._read_micro_batch_cutting_padding(
                    self._sample_epochs_of_micro_batch(step_index, pass_index, rank)
                )
            )
        self.tokens = self.tokens.plus_batch_tokens_and_padding(batch)
        return batch

    @contextlib.contextmanager
    def read_rank_batches_ahead(
        self, rank: int, read_ahead_settings: ReadAheadSettings
    ) -> Iterator[None]:
        """Read this rank's micro batches ahead while the context is open.

        The order of samples must not change meanwhile.
        """
        if read_ahead_settings.workers is None:
            yield
            return
        ahead = BatchReadAhead(
            self._read_micro_batch_cutting_padding,
            lambda micro_batch_index: self._sample_epochs_of_micro_batch(*micro_batch_index, rank),
            self.batch.accumulation_steps,
            read_ahead_settings,
        )
        self._ahead = rank, ahead
        try:
            yield
        finally:
            self._ahead = None
            ahead.close()

    def _read_micro_batch_cutting_padding(
        self, sample_epochs: list[SampleEpoch]
    ) -> dict[str, torch.Tensor]:
        # Some data sets make a whole batch faster than its samples one by one.
        make_batch = getattr(self.samples, "batch", None)
        return (
            self._cut_padding_if_bucketed(make_batch(sample_epochs))
            if make_batch
            else self.read_and_stack_samples(self.samples, sample_epochs)
        )

    def read_and_stack_samples(
        self, samples: Samples, sample_epochs: Sequence[SampleEpoch]
    ) -> dict[str, torch.Tensor]:
        """Return the batch of these of `samples`: the training's, or others.

        The user's own samples are read with random generators seeded for each of them, and leave
        the training's random numbers as they were.
        """
        if not self._are_user_samples:
            return self.stack_and_cut_padding(
                [samples.sample(index, epoch) for index, epoch, _ in sample_epochs]
            )
        with restore_cpu_generators_after():
            samples_read = []
            for index, epoch, _ in sample_epochs:
                seed_cpu_generators_for_sample(self.seed, index, epoch)
                samples_read.append(samples.sample(index, epoch))
            return self.stack_and_cut_padding(samples_read)

    def stack_and_cut_padding(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """Return a batch of these samples in the form that the model accepts."""
        return self._cut_padding_if_bucketed(self._stack(samples))

    def _cut_padding_if_bucketed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return (
            cut_padding_to_shortest_fitting_bucket(batch, self.buckets) if self.buckets else batch
        )

    def sample_indices_of_micro_batch(
        self, step_index: int, pass_index: int, rank: int
    ) -> list[int]:
        """Return the indices of the samples of `micro_batch`."""
        return [
            sample_epoch.sample_index
            for sample_epoch in self._sample_epochs_of_micro_batch(step_index, pass_index, rank)
        ]

    def sample_indices_of_step(self, step_index: int) -> list[int]:
        """Return the indices of the samples of a step, over all passes and ranks."""
        passes = itertools.product(
            range(self.batch.accumulation_steps), range(self.batch.data_parallel_ranks)
        )
        return [
            index
            for pass_index, rank in passes
            for index in self.sample_indices_of_micro_batch(step_index, pass_index, rank)
        ]

    def _sample_epochs_of_micro_batch(
        self, step_index: int, pass_index: int, rank: int
    ) -> list[SampleEpoch]:
        batch_plan = self.batch
        # Within a step the first passes of all ranks come first, then the second passes.
        offset = (pass_index * batch_plan.data_parallel_ranks + rank) * batch_plan.micro_samples
        first_number = (step_index - self._step) * batch_plan.global_samples
        if self.buckets:
            sample_epochs = self._bucket_sorted_sample_epochs_of_step(
                first_number, batch_plan.global_samples
            )[offset : offset + batch_plan.micro_samples]
        else:
            sample_epochs = self._sample_epochs_of_unskipped_numbers(
                range(first_number + offset, first_number + offset + batch_plan.micro_samples)
            )
        return [sample_epoch._replace(step=step_index) for sample_epoch in sample_epochs]

    def _sample_epochs_of_unskipped_numbers(self, sample_numbers: range) -> list[SampleEpoch]:
        positions = [
            self.left_out.position_of_unskipped_sample(self._first_position, sample_number)
            for sample_number in sample_numbers
        ]
        sample_epochs: list[SampleEpoch] = self.order.sample_epochs_at(positions)
        return sample_epochs

    def _bucket_sorted_sample_epochs_of_step(
        self, first_sample_number: int, sample_count: int
    ) -> list[SampleEpoch]:
        """Return the samples of a whole step, sorted by bucket; within a bucket the order stays."""
        # The whole step is sorted, so that any number of ranks gets the same micro batches.
        position = self.left_out.position_of_unskipped_sample(
            self._first_position, first_sample_number
        )
        if self._sorted_step is None or self._sorted_step[0] != position:
            sample_epochs = self._sample_epochs_of_unskipped_numbers(
                range(first_sample_number, first_sample_number + sample_count)
            )
            padded: Any = self.samples
            buckets = [
                bisect.bisect_left(self.buckets, padded.size(sample_epoch.sample_index))
                for sample_epoch in sample_epochs
            ]
            self._sorted_step = (
                position,
                [sample_epochs[i] for i in sorted(range(sample_count), key=buckets.__getitem__)],
            )
        return self._sorted_step[1]

"""Several data sets as one, each with its share of the samples; independent of the number of ranks.

The order consists of blocks of 65,536 places. Each block has every source as often as its weight
requires, shuffled. So the number of samples that each source has given is known at any place
without counting from the beginning: time and memory are constant, and a resume has nothing to
replay. The samples of each source have an endless order of their own.

And a part of one that is held out for evaluation (`data.evaluation: {share: ...}`): the choice is a
function of the seed and the number of samples. Memory grows with that part, not with the data.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.order import SampleEpoch, SampleOrder, epoch_permutation
from ortlaunch.worker.data.samples import Sample, Samples
from ortlaunch.worker.data.streams.samples import StreamedSamples
from ortlaunch.worker.data.streams.writer import Position

# Places of a block.
BLOCK = 1 << 16
# The "epoch" whose order chooses what is held out: no training gets there, so that the order of its
# samples is independent of the choice.
_CHOICE = 1 << 32
# Samples of each source that an audit reads, where a source is streamed.
_MAX_AUDITED = 20_000
_Ints = NDArray[np.int64]


def source_seed(seed: int, source_index: int) -> int:
    """Return the seed of a source's order and masks."""
    # It differs by source, so that a corpus that is in a mixture twice is shuffled in two ways.
    return seed + ((source_index + 1) << 32)


class SourceSample(NamedTuple):
    """Which sample of which source."""

    source_index: int
    """Number of the source in the mixture, from 0."""
    sample_index: int
    """Index of the sample within its source."""


class BlockSources(NamedTuple):
    """The sources of the places of a block, each (places,)."""

    sources: _Ints
    """Number of the source at each place."""
    earlier_counts: _Ints
    """Earlier places of the block that have the same source."""


class HeldOutSplit(NamedTuple):
    """The two parts of a data set."""

    training: Samples
    held_out: Samples
    """For the evaluation."""


class Mixture:
    """The samples of several sources; indices go through one source after the other."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = parts
        self.weights = weights
        self.ends = list(itertools.accumulate(map(len, parts)))
        # `Batches` uses `batch` where it is not None.
        self.batch = (
            self._batch_grouped_by_source if all(hasattr(part, "batch") for part in parts) else None
        )

    def __len__(self) -> int:
        return self.ends[-1]

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample; `epoch` is the epoch of the sample's own source."""
        source_sample = self._source_sample(index)
        return self.parts[source_sample.source_index].sample(source_sample.sample_index, epoch)

    def _batch_grouped_by_source(
        self, sample_epochs: Sequence[SampleEpoch]
    ) -> dict[str, torch.Tensor]:
        """Return a batch; each source makes all of its samples in one call."""
        source_samples = [
            self._source_sample(sample_epoch.sample_index) for sample_epoch in sample_epochs
        ]
        rows = sorted(range(len(sample_epochs)), key=lambda row: source_samples[row].source_index)
        batches = []
        for source_index, source_rows in itertools.groupby(
            rows, key=lambda row: source_samples[row].source_index
        ):
            part: Any = self.parts[source_index]
            batches.append(
                part.batch(
                    [
                        sample_epochs[row]._replace(sample_index=source_samples[row].sample_index)
                        for row in source_rows
                    ]
                )
            )
        # The inverse of the sort by source.
        original_order = torch.tensor(rows).argsort()
        return {
            name: torch.cat([batch[name] for batch in batches])[original_order]
            for name in batches[0]
        }

    def _source_sample(self, index: int) -> SourceSample:
        source = bisect.bisect_right(self.ends, index)
        return SourceSample(source, index - self.ends[source] + len(self.parts[source]))

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample, for sources that count them."""
        source_sample = self._source_sample(index)
        part: Any = self.parts[source_sample.source_index]
        return int(part.size(source_sample.sample_index))

    @property
    def classes(self) -> int:
        return max(getattr(part, "classes", 0) for part in self.parts)

    @property
    def varies(self) -> bool:
        return any(getattr(part, "varies", False) for part in self.parts)

    @property
    def largest(self) -> tuple[int, str]:
        return max(getattr(part, "largest", (-1, "")) for part in self.parts)

    def order(self, seed: int) -> MixedOrder:
        mixed_order = MixedOrder([len(part) for part in self.parts], self.weights, seed)
        for source_index, part in enumerate(self.parts):
            if isinstance(part, StreamedSamples):
                mixed_order.orders[source_index] = part
        return mixed_order


class MixedOrder:
    """The endless order of a mixture's samples."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        self.counts = block_position_count_by_source(weights)
        self.orders: list[SampleOrder | StreamedSamples] = [
            SampleOrder(size, source_seed(seed, source_index))
            for source_index, size in enumerate(sizes)
        ]
        self.begins = [0, *itertools.accumulate(sizes[:-1])]
        # The present block, and the next one if a batch reaches into it.
        self._blocks: dict[int, BlockSources] = {}

    def sample_epochs_at(self, positions: list[int]) -> list[SampleEpoch]:
        """Return the sample, with the epoch of its source, at each of these places."""
        return [
            self._sample_epoch_at_block_offset(*divmod(position, BLOCK)) for position in positions
        ]

    def passed(self, order_place: int, samples_ahead: int) -> list[Position]:
        """Release the samples of streamed sources before a place; return their positions."""
        block, block_offset = divmod(order_place, BLOCK)
        used_in_block = np.bincount(
            self._sources_of_block(block).sources[:block_offset],
            minlength=len(self.counts),
        )
        used_by_source = (block * self.counts + used_in_block).tolist()
        return [
            position
            for order, used in zip(self.orders, used_by_source)
            if isinstance(order, StreamedSamples)
            for position in order.passed(used, samples_ahead)
        ]

    def _sample_epoch_at_block_offset(self, block: int, block_offset: int) -> SampleEpoch:
        # Every earlier block had `counts[source]` samples of this source.
        block_sources = self._sources_of_block(block)
        source = int(block_sources.sources[block_offset])
        earlier_count = int(block_sources.earlier_counts[block_offset])
        (sample_epoch,) = self.orders[source].sample_epochs_at(
            [block * int(self.counts[source]) + earlier_count]
        )
        return SampleEpoch(self.begins[source] + sample_epoch.sample_index, sample_epoch.epoch)

    def _sources_of_block(self, block: int) -> BlockSources:
        if block not in self._blocks:
            self._blocks = {
                kept_block: kept_sources
                for kept_block, kept_sources in self._blocks.items()
                if kept_block == block - 1
            }
            places = np.arange(BLOCK)
            sources = np.repeat(np.arange(len(self.counts)), self.counts)[
                epoch_permutation(BLOCK, self.seed, block)(places)
            ]
            used_in_block = np.empty_like(places)
            begins = np.cumsum(self.counts) - self.counts
            used_in_block[np.argsort(sources, kind="stable")] = places - np.repeat(
                begins, self.counts
            )
            self._blocks[block] = BlockSources(sources, used_in_block)
        return self._blocks[block]


def streamed_sources_of_samples(samples: Samples) -> list[StreamedSamples]:
    """Return the streamed sources of a data set."""
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    return [part for part in parts if isinstance(part, StreamedSamples)]


def indices_of_all_or_first_streamed_samples(samples: Samples) -> Sequence[int]:
    """Return the indices of samples that can be read now: all, or the first ones of each source."""
    if not streamed_sources_of_samples(samples):
        return range(len(samples))
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    begins = itertools.accumulate([0, *map(len, parts)])
    return [
        begin + index
        for begin, part in zip(begins, parts)
        for index in (
            part.wait_and_list_indices_read_first(_MAX_AUDITED)
            if isinstance(part, StreamedSamples)
            else range(len(part))
        )[:_MAX_AUDITED]
    ]


def block_position_count_by_source(weight_by_source: Sequence[float]) -> _Ints:
    """Return the number of places of a block for each source; their sum is `BLOCK`."""
    exact = np.asarray(weight_by_source, np.float64) / sum(weight_by_source) * BLOCK
    counts: _Ints = np.floor(exact).astype(np.int64)
    # The sources with the largest remainders get one place more.
    largest = np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]
    counts[largest] += 1
    return counts


class SampleSubset:
    """Some of the samples of a data set; all other attributes are those of the whole."""

    def __init__(
        self, whole_samples: Samples, count: int, index_of: Callable[[_Ints], _Ints]
    ) -> None:
        """Choose samples: `index_of` maps indices of the part, (n,), to those of the whole."""
        self.whole = whole_samples
        self._count = count
        self._index_of = index_of

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        return self.whole.sample(self._whole_index(index), epoch)

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample, for data that count them."""
        whole_samples: Any = self.whole
        return int(whole_samples.size(self._whole_index(index)))

    def _whole_index(self, index: int) -> int:
        return int(self._index_of(np.array([index]))[0])

    def __getattr__(self, name: str) -> Any:
        # A copy for another process looks names up before it has its fields.
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        attribute = getattr(self.whole, name)
        return self._batch_of_subset_indices if name == "batch" else attribute

    def _batch_of_subset_indices(
        self, sample_epochs: Sequence[SampleEpoch]
    ) -> dict[str, torch.Tensor]:
        whole_samples: Any = self.whole
        indices = self._index_of(
            np.array([sample_epoch.sample_index for sample_epoch in sample_epochs])
        ).tolist()
        batch: dict[str, torch.Tensor] = whole_samples.batch(
            [
                sample_epoch._replace(sample_index=index)
                for index, sample_epoch in zip(indices, sample_epochs)
            ]
        )
        return batch


def split_held_out_samples(samples: Samples, held_out_settings: HeldOut, seed: int) -> HeldOutSplit:
    """Return the part to train on and the part that is held out.

    Each source of a mixture gives its share of the samples.

    Raises:
        DataError: one of the parts would be empty.
    """
    total = len(samples)
    share = (
        held_out_settings.samples / total
        if held_out_settings.samples
        else float(held_out_settings.share or 0)
    )
    if not isinstance(samples, Mixture):
        return _split_held_out_count(
            samples, held_out_settings.samples or max(1, round(share * total)), seed
        )
    # Cumulative rounding, so that the parts have exactly as many samples as requested.
    ends = [round(end * share) for end in (0, *samples.ends)]
    splits = [
        _split_held_out_count(part, stop - start, source_seed(seed, source_index))
        for source_index, (part, start, stop) in enumerate(zip(samples.parts, ends, ends[1:]))
    ]
    training_part = Mixture([split.training for split in splits], samples.weights)
    held_out_parts = [split.held_out for split in splits if len(split.held_out)]
    if not held_out_parts:
        raise DataError(f"data.evaluation: {share:g} of {total:,} samples is none of any source")
    return HeldOutSplit(training_part, Mixture(held_out_parts, [1.0] * len(held_out_parts)))


def _split_held_out_count(samples: Samples, held_out_count: int, seed: int) -> HeldOutSplit:
    total = len(samples)
    if held_out_count >= total:
        raise DataError(
            f"data.evaluation: {held_out_count:,} samples would be held out, and a source of data.train has "
            f"{total:,}: none is left to train on"
        )
    held_out_indices = np.sort(epoch_permutation(total, seed, _CHOICE)(np.arange(held_out_count)))
    # The number of training samples before each held-out one.
    training_before = held_out_indices - np.arange(held_out_count)
    training_part = SampleSubset(
        samples,
        total - held_out_count,
        lambda part_indices: (
            part_indices + np.searchsorted(training_before, part_indices, side="right")
        ),
    )
    held_out_part = SampleSubset(
        samples, held_out_count, lambda part_indices: held_out_indices[part_indices]
    )
    return HeldOutSplit(training_part, held_out_part)

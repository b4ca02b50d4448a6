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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.worker.data.order import Order, permutation
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import Sample, Samples
from ortlaunch.worker.data.streams.samples import StreamedSamples
from ortlaunch.worker.data.streams.writer import Position

# Places of a block.
BLOCK = 1 << 16
# The "epoch" whose order chooses what is held out: no training gets there, so that the order of its
# samples is independent of the choice.
_CHOICE = 1 << 32
# Samples of each source that an audit reads, where a source is streamed.
_FEW = 20_000
_Ints = NDArray[np.int64]


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's order and masks."""
    # It differs by source, so that a corpus that is in a mixture twice is shuffled in two ways.
    return seed + ((number + 1) << 32)


class Mixture:
    """The samples of several sources; indices go through one source after the other."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = parts
        self.weights = weights
        self.ends = list(itertools.accumulate(map(len, parts)))
        # `Batches` uses `batch` where it is not None.
        self.batch = self._batch if all(hasattr(part, "batch") for part in parts) else None

    def __len__(self) -> int:
        return self.ends[-1]

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample; `epoch` is the epoch of the sample's own source."""
        number, within = self._within(index)
        return self.parts[number].sample(within, epoch)

    def _batch(self, places: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Return a batch; each source makes all of its samples in one call."""
        of = [self._within(index) for index, _ in places]
        rows = sorted(range(len(places)), key=lambda row: of[row][0])
        made = []
        for number, mine in itertools.groupby(rows, key=lambda row: of[row][0]):
            part: Any = self.parts[number]
            made.append(part.batch([(of[row][1], places[row][1]) for row in mine]))
        # The inverse of the sort by source.
        back = torch.tensor(rows).argsort()
        return {name: torch.cat([batch[name] for batch in made])[back] for name in made[0]}

    def _within(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and the sample's index within it."""
        number = bisect.bisect_right(self.ends, index)
        return number, index - self.ends[number] + len(self.parts[number])

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample, for sources that count them."""
        number, within = self._within(index)
        part: Any = self.parts[number]
        return int(part.size(within))

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
        found = MixedOrder([len(part) for part in self.parts], self.weights, seed)
        for number, part in enumerate(self.parts):
            if isinstance(part, StreamedSamples):
                found.orders[number] = part
        return found


class MixedOrder:
    """The endless order of a mixture's samples."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        self.counts = shares(weights)
        self.orders: list[Order | StreamedSamples] = [
            Order(size, source_seed(seed, number)) for number, size in enumerate(sizes)
        ]
        self.begins = [0, *itertools.accumulate(sizes[:-1])]
        # The present block, and the next one if a batch reaches into it.
        self._blocks: dict[int, tuple[_Ints, _Ints]] = {}

    def at(self, places: list[int]) -> list[tuple[int, int]]:
        """Return (sample, epoch of its source) at each of these places."""
        return [self._at(*divmod(place, BLOCK)) for place in places]

    def passed(self, place: int, reach: int) -> list[Position]:
        """Release the samples of streamed sources before a place; return their positions."""
        block, within = divmod(place, BLOCK)
        before = np.bincount(self._block(block)[0][:within], minlength=len(self.counts))
        of_source = (block * self.counts + before).tolist()
        return [
            position
            for order, own in zip(self.orders, of_source)
            if isinstance(order, StreamedSamples)
            for position in order.passed(own, reach)
        ]

    def _at(self, block: int, within: int) -> tuple[int, int]:
        # Every earlier block had `counts[number]` samples of this source.
        sources, before = self._block(block)
        number = int(sources[within])
        ((index, epoch),) = self.orders[number].at(
            [block * int(self.counts[number]) + int(before[within])]
        )
        return self.begins[number] + index, epoch

    def _block(self, block: int) -> tuple[_Ints, _Ints]:
        """Return the source at each place of a block, and its number of earlier places there."""
        if block not in self._blocks:
            self._blocks = {
                number: known for number, known in self._blocks.items() if number == block - 1
            }
            places = np.arange(BLOCK)
            sources = np.repeat(np.arange(len(self.counts)), self.counts)[
                permutation(BLOCK, self.seed, block)(places)
            ]
            before = np.empty_like(places)
            begins = np.cumsum(self.counts) - self.counts
            before[np.argsort(sources, kind="stable")] = places - np.repeat(begins, self.counts)
            self._blocks[block] = sources, before
        return self._blocks[block]


def streams_of(samples: Samples) -> list[StreamedSamples]:
    """Return the streamed sources of a data set."""
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    return [part for part in parts if isinstance(part, StreamedSamples)]


def at_hand(samples: Samples) -> Sequence[int]:
    """Return the indices of samples that can be read now: all, or the first ones of each source."""
    if not streams_of(samples):
        return range(len(samples))
    parts = samples.parts if isinstance(samples, Mixture) else [samples]
    begins = itertools.accumulate([0, *map(len, parts)])
    return [
        begin + index
        for begin, part in zip(begins, parts)
        for index in (part.first(_FEW) if isinstance(part, StreamedSamples) else range(len(part)))[
            :_FEW
        ]
    ]


def shares(weights: Sequence[float]) -> _Ints:
    """Return the number of places of a block for each source; their sum is `BLOCK`."""
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts: _Ints = np.floor(exact).astype(np.int64)
    # The sources with the largest remainders get one place more.
    largest = np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]
    counts[largest] += 1
    return counts


class SplitPart:
    """Some of the samples of a data set; all other attributes are those of the whole."""

    def __init__(self, whole: Samples, count: int, index_of: Callable[[_Ints], _Ints]) -> None:
        """Choose samples: `index_of` maps indices of the part, (n,), to those of the whole."""
        self.whole = whole
        self._count = count
        self._index_of = index_of

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        return self.whole.sample(self._index(index), epoch)

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample, for data that count them."""
        whole: Any = self.whole
        return int(whole.size(self._index(index)))

    def _index(self, index: int) -> int:
        return int(self._index_of(np.array([index]))[0])

    def __getattr__(self, name: str) -> Any:
        # A copy for another process looks names up before it has its fields.
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        found = getattr(self.whole, name)
        return self._batch if name == "batch" else found

    def _batch(self, places: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        whole: Any = self.whole
        indices = self._index_of(np.array([index for index, _ in places])).tolist()
        found: dict[str, torch.Tensor] = whole.batch(
            [(index, epoch) for index, (_, epoch) in zip(indices, places)]
        )
        return found


def split(samples: Samples, held: HeldOut, seed: int) -> tuple[Samples, Samples]:
    """Return the training part and the part that is held out.

    Each source of a mixture gives its share of the samples.

    Raises:
        DataError: one of the parts would be empty.
    """
    total = len(samples)
    share = held.samples / total if held.samples else float(held.share or 0)
    if not isinstance(samples, Mixture):
        return _split(samples, held.samples or max(1, round(share * total)), seed)
    # Cumulative rounding, so that the parts have exactly as many samples as requested.
    ends = [round(end * share) for end in (0, *samples.ends)]
    pairs = [
        _split(part, after - before, source_seed(seed, number))
        for number, (part, before, after) in enumerate(zip(samples.parts, ends, ends[1:]))
    ]
    kept = Mixture([part for part, _ in pairs], samples.weights)
    chosen = [part for _, part in pairs if len(part)]
    if not chosen:
        raise DataError(f"data.evaluation: {share:g} of {total:,} samples is none of any source")
    return kept, Mixture(chosen, [1.0] * len(chosen))


def _split(samples: Samples, count: int, seed: int) -> tuple[SplitPart, SplitPart]:
    total = len(samples)
    if count >= total:
        raise DataError(
            f"data.evaluation: {count:,} samples would be held out, and a source of data.train has "
            f"{total:,}: none is left to train on"
        )
    held = np.sort(permutation(total, seed, _CHOICE)(np.arange(count)))
    # The number of training samples before each held-out one.
    before = held - np.arange(count)
    kept = SplitPart(
        samples, total - count, lambda at: at + np.searchsorted(before, at, side="right")
    )
    return kept, SplitPart(samples, count, lambda at: held[at])

"""Several data sets as one, each with its share of the samples; independent of the number of ranks.

The order consists of blocks of 65,536 places. Each block has every source as often as its weight
requires, shuffled. So the number of samples that each source has given is known at any place
without counting from the beginning: time and memory are constant, and a resume has nothing to
replay. The samples of each source have an endless order of their own.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.worker.data.order import Order, permutation
from ortlaunch.worker.data.samples import Sample, Samples

# Places of a block.
BLOCK = 1 << 16
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
        return MixedOrder([len(part) for part in self.parts], self.weights, seed)


class MixedOrder:
    """The endless order of a mixture's samples."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        self.counts = shares(weights)
        self.orders = [Order(size, source_seed(seed, number)) for number, size in enumerate(sizes)]
        self.begins = [0, *itertools.accumulate(sizes[:-1])]
        # The present block, and the next one if a batch reaches into it.
        self._blocks: dict[int, tuple[_Ints, _Ints]] = {}

    def at(self, places: list[int]) -> list[tuple[int, int]]:
        """Return (sample, epoch of its source) at each of these places."""
        return [self._at(*divmod(place, BLOCK)) for place in places]

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


def shares(weights: Sequence[float]) -> _Ints:
    """Return the number of places of a block for each source; their sum is `BLOCK`."""
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts: _Ints = np.floor(exact).astype(np.int64)
    # The sources with the largest remainders get one place more.
    largest = np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]
    counts[largest] += 1
    return counts

"""Several data sets as one, each with its share of the samples, in one order on any world.

The order is made of blocks of 65,536 places. A block holds each source as often as its weight says, shuffled, so that
at any place it is known without counting from the beginning how many samples each source has given: constant time and
memory, nothing to wind forward at a resume. The samples of a source come in an endless order of its own.
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

BLOCK = 1 << 16
_Ints = NDArray[np.int64]


def source_seed(seed: int, number: int) -> int:
    """Of a source's own order and masks: a corpus that is in a mixture twice is not the same twice."""
    return seed + ((number + 1) << 32)


class Mixture:
    """The samples of several sources, numbered one source after the other."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts = parts
        self.weights = weights
        self.ends = list(itertools.accumulate(map(len, parts)))
        self.batch = self._batch if all(hasattr(part, "batch") for part in parts) else None

    def __len__(self) -> int:
        return self.ends[-1]

    def sample(self, index: int, epoch: int) -> Sample:
        """`epoch` is that of the sample's own source."""
        number, within = self._within(index)
        return self.parts[number].sample(within, epoch)

    def _batch(self, places: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """Each source makes its samples at once."""
        of = [self._within(index) for index, _ in places]
        rows = sorted(range(len(places)), key=lambda row: of[row][0])
        made = []
        for number, mine in itertools.groupby(rows, key=lambda row: of[row][0]):
            part: Any = self.parts[number]
            made.append(part.batch([(of[row][1], places[row][1]) for row in mine]))
        back = torch.tensor(rows).argsort()
        return {name: torch.cat([batch[name] for batch in made])[back] for name in made[0]}

    def _within(self, index: int) -> tuple[int, int]:
        """Source of a sample, and which of its samples it is."""
        number = bisect.bisect_right(self.ends, index)
        return number, index - self.ends[number] + len(self.parts[number])

    def size(self, index: int) -> int:
        """Tokens of a sample, for those that have them counted."""
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
    """The endless order of a mixture."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.seed = seed
        self.counts = shares(weights)
        self.orders = [Order(size, source_seed(seed, number)) for number, size in enumerate(sizes)]
        self.begins = [0, *itertools.accumulate(sizes[:-1])]
        self._blocks: dict[
            int, tuple[_Ints, _Ints]
        ] = {}  # this one, and the next where a batch reaches into it

    def at(self, places: list[int]) -> list[tuple[int, int]]:
        """(sample, epoch of its source) at each of these places."""
        return [self._at(*divmod(place, BLOCK)) for place in places]

    def _at(self, block: int, within: int) -> tuple[int, int]:
        sources, before = self._block(block)
        number = int(sources[within])
        ((index, epoch),) = self.orders[number].at(
            [block * int(self.counts[number]) + int(before[within])]
        )
        return self.begins[number] + index, epoch

    def _block(self, block: int) -> tuple[_Ints, _Ints]:
        """Which source is at each place of a block, and how many places before it in the block are the same one's."""
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
    """Places of a block for each source: its share, rounded so that all together fill the block."""
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts: _Ints = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]
    counts[largest] += 1
    return counts

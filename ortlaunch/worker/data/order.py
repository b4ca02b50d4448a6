"""The order of samples in an epoch: a function of seed, epoch and place, for any number of ranks.

Up to 65,536 samples are shuffled by NumPy; that order takes half a megabyte. The order of a larger
data set is never stored. A Feistel network of eight rounds permutes the integers of a rectangle,
about sqrt(n) x sqrt(n), that is a little larger than the data set. A result outside the data set
goes through the network again until it is inside (cycle walking: Black and Rogaway 2002, "Ciphers
with arbitrary finite domains"). Memory is constant, every place takes the same time, and a resume
has nothing to replay.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# The names of the two orders in checkpoints.
SHUFFLE = "shuffle"
FEISTEL = "feistel"
# For few samples, a network of eight rounds would favor some orders.
_MOST_SHUFFLED = 1 << 16
_ROUNDS = 8
# The multipliers of MurmurHash3's finalizer.
_FIRST = np.uint64(0xFF51AFD7ED558CCD)
_SECOND = np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)
_DROPPED = np.uint64(24)


class Permutation(Protocol):
    """The order of one epoch: places, (n,) int64 -> samples, (n,) int64."""

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]: ...


def order_name(samples: int) -> str:
    """Return the name of the order that is used for this number of samples."""
    return SHUFFLE if samples <= _MOST_SHUFFLED else FEISTEL


class Order:
    """The endless order of a data set's samples, epoch after epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        # The present epoch, and the next one if a batch reaches into it.
        self._epochs: dict[int, Permutation] = {}

    def at(self, places: list[int]) -> list[tuple[int, int]]:
        """Return (sample, epoch) at each of these places, which go on from epoch to epoch."""
        epochs, within = np.divmod(np.asarray(places, dtype=np.int64), self.samples)
        found = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = self._epoch(int(epoch))(within[chosen])
        return list(zip(found.tolist(), epochs.tolist()))

    def _epoch(self, epoch: int) -> Permutation:
        if epoch not in self._epochs:
            self._epochs = {
                number: known for number, known in self._epochs.items() if number == epoch - 1
            }
            self._epochs[epoch] = permutation(self.samples, self.seed, epoch)
        return self._epochs[epoch]


def permutation(samples: int, seed: int, epoch: int) -> Permutation:
    """Return the permutation of the places 0 to `samples` - 1 in this epoch."""
    if order_name(samples) == FEISTEL:
        return Feistel(samples, seed, epoch)
    order: NDArray[np.int64] = np.random.Generator(np.random.Philox([seed, epoch])).permutation(
        samples
    )
    return lambda places: order[places]


class Feistel:
    """A permutation that is computed for each place instead of stored."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        across = math.isqrt(samples - 1) + 1
        # `across` x `down` is the smallest rectangle of this width that has room for all samples.
        self.samples = np.uint64(samples)
        self.across = np.uint64(across)
        self.down = np.uint64(-(-samples // across))
        self.keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = self._once(places.astype(np.uint64))
        # This ends: a walk along a permutation returns to its start, which is in the data set.
        while (beside := found >= self.samples).any():
            found[beside] = self._once(found[beside])
        return found.astype(np.int64)

    def _once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers of the rectangle once."""
        # Row and column in turn are shifted (modulo their size) by a hash of the other; each shift
        # can be undone, so that the whole is a permutation.
        row, column = np.divmod(numbers, self.across)
        for key, other in zip(self.keys[::2], self.keys[1::2]):
            row = (row + _hash(column, key)) % self.down
            column = (column + _hash(row, other)) % self.across
        found: NDArray[np.uint64] = row * self.across + column
        return found


def _hash(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return 40 well mixed bits of each number."""
    # Products of arrays wrap round without a warning.
    mixed: NDArray[np.uint64] = (numbers ^ key) * _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _DROPPED
    return mixed

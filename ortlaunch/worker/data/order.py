"""In which order an epoch takes its samples: a function of seed, epoch and place, the same on any world.

Up to 65,536 samples are shuffled whole by NumPy, half a megabyte. The order of more is never held: a Feistel network
of eight rounds permutes the numbers of a rectangle, about sqrt(n) x sqrt(n) and little larger than the data set; what
falls beside the data set goes through again until it falls in it (cycle walking: Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"). Constant memory, the same time for every place, nothing to wind forward at a resume.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# what a checkpoint calls them
SHUFFLE = "shuffle"
FEISTEL = "feistel"
_MOST_SHUFFLED = 1 << 16  # with few samples a network of eight rounds would prefer some orders
_ROUNDS = 8
# MurmurHash3's finalizer
_FIRST = np.uint64(0xFF51AFD7ED558CCD)
_SECOND = np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)
_DROPPED = np.uint64(24)


class Permutation(Protocol):
    """The order of one epoch."""

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]: ...


def order_name(samples: int) -> str:
    """Of the order that so many samples have."""
    return SHUFFLE if samples <= _MOST_SHUFFLED else FEISTEL


class Order:
    """The endless order of a data set, epoch after epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._epochs: dict[
            int, Permutation
        ] = {}  # this one, and the next where a batch reaches into it

    def at(self, places: list[int]) -> list[tuple[int, int]]:
        """(sample, epoch) at each of these places, which count on from epoch to epoch."""
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
    """Of the places 0 to `samples` - 1, in this epoch."""
    if order_name(samples) == FEISTEL:
        return Feistel(samples, seed, epoch)
    order: NDArray[np.int64] = np.random.Generator(np.random.Philox([seed, epoch])).permutation(
        samples
    )
    return lambda places: order[places]


class Feistel:
    """A permutation that is computed, not held; places are int64, (any number,), and so is what it returns."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        across = math.isqrt(samples - 1) + 1
        self.samples = np.uint64(samples)
        self.across = np.uint64(across)
        self.down = np.uint64(-(-samples // across))
        self.keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = self._once(places.astype(np.uint64))
        while (beside := found >= self.samples).any():
            found[beside] = self._once(found[beside])
        return found.astype(np.int64)

    def _once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Within the rectangle: each half in turn is moved round by a hash of the other, which can be undone."""
        row, column = np.divmod(numbers, self.across)
        for key, other in zip(self.keys[::2], self.keys[1::2]):
            row = (row + _hash(column, key)) % self.down
            column = (column + _hash(row, other)) % self.across
        found: NDArray[np.uint64] = row * self.across + column
        return found


def _hash(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """40 well mixed bits."""
    mixed: NDArray[np.uint64] = (numbers ^ key) * _FIRST  # of arrays: wraps round
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _DROPPED
    return mixed

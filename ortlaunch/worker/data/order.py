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
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# The names of the two orders in checkpoints.
SHUFFLE = "shuffle"
FEISTEL = "feistel"
# For few samples, a network of eight rounds would favor some orders.
_MOST_SHUFFLED = 1 << 16
_ROUNDS = 8
# The multipliers of MurmurHash3's finalizer.
_FIRST_MULTIPLIER = np.uint64(0xFF51AFD7ED558CCD)
_SECOND_MULTIPLIER = np.uint64(0xC4CEB9FE1A85EC53)
_HALF_BITS = np.uint64(32)
_DROPPED_BITS = np.uint64(24)


class SampleEpoch(NamedTuple):
    """A sample at a place of an order."""

    sample_index: int
    """Index of the sample in its data set."""
    epoch: int
    """Passes over the sample's own source before this one."""
    step: int | None = None
    """Step, from 0, that trains on it; None: none does."""


class Permutation(Protocol):
    """The order of one epoch: places, (n,) int64 -> samples, (n,) int64."""

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]: ...


def order_method_name(sample_count: int) -> str:
    """Return the name of the order that is used for this number of samples."""
    return SHUFFLE if sample_count <= _MOST_SHUFFLED else FEISTEL


class SampleOrder:
    """The endless order of a data set's samples, epoch after epoch."""

    def __init__(self, sample_count: int, seed: int) -> None:
        self.samples = sample_count
        self.seed = seed
        # The present epoch, and the next one if a batch reaches into it.
        self._epochs: dict[int, Permutation] = {}

    def sample_epochs_at(self, positions: list[int]) -> list[SampleEpoch]:
        """Return the sample at each of these places, which go on from epoch to epoch."""
        epochs, epoch_offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        sample_indices = np.empty_like(epoch_offsets)
        for epoch in np.unique(epochs):
            is_in_epoch = epochs == epoch
            sample_indices[is_in_epoch] = self._cached_permutation_of_epoch(int(epoch))(
                epoch_offsets[is_in_epoch]
            )
        return list(map(SampleEpoch, sample_indices.tolist(), epochs.tolist()))

    def _cached_permutation_of_epoch(self, epoch: int) -> Permutation:
        if epoch not in self._epochs:
            self._epochs = {
                kept_epoch: kept_permutation
                for kept_epoch, kept_permutation in self._epochs.items()
                if kept_epoch == epoch - 1
            }
            self._epochs[epoch] = epoch_permutation(self.samples, self.seed, epoch)
        return self._epochs[epoch]


def epoch_permutation(sample_count: int, seed: int, epoch: int) -> Permutation:
    """Return the permutation of the places 0 to `sample_count` - 1 in this epoch."""
    if order_method_name(sample_count) == FEISTEL:
        return FeistelPermutation(sample_count, seed, epoch)
    order: NDArray[np.int64] = np.random.Generator(np.random.Philox([seed, epoch])).permutation(
        sample_count
    )
    return lambda places: order[places]


class FeistelPermutation:
    """A permutation that is computed for each place instead of stored."""

    def __init__(self, sample_count: int, seed: int, epoch: int) -> None:
        across = math.isqrt(sample_count - 1) + 1
        # `across` x `down` is the smallest rectangle of this width that has room for all samples.
        self.samples = np.uint64(sample_count)
        self.across = np.uint64(across)
        self.down = np.uint64(-(-sample_count // across))
        self.keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        permuted = self._permute_grid_numbers_once(places.astype(np.uint64))
        # This ends: a walk along a permutation returns to its start, which is in the data set.
        while (is_outside := permuted >= self.samples).any():
            permuted[is_outside] = self._permute_grid_numbers_once(permuted[is_outside])
        return permuted.astype(np.int64)

    def _permute_grid_numbers_once(self, grid_numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # Row and column in turn are shifted (modulo their size) by a hash of the other; each shift
        # can be undone, so that the whole is a permutation.
        row, column = np.divmod(grid_numbers, self.across)
        for key, other in zip(self.keys[::2], self.keys[1::2]):
            row = (row + _mix_to_40_bits(column, key)) % self.down
            column = (column + _mix_to_40_bits(row, other)) % self.across
        permuted: NDArray[np.uint64] = row * self.across + column
        return permuted


def _mix_to_40_bits(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return 40 well mixed bits of each number."""
    # Products of arrays wrap round without a warning.
    mixed: NDArray[np.uint64] = (numbers ^ key) * _FIRST_MULTIPLIER
    mixed ^= mixed >> _HALF_BITS
    mixed *= _SECOND_MULTIPLIER
    mixed >>= _DROPPED_BITS
    return mixed

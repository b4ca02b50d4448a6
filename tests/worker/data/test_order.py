"""The order of samples: each once in an epoch, as random as NumPy's, in constant memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.order import FeistelPermutation, SampleOrder, epoch_permutation

# Samples of the statistical tests, and cells of each axis of their tables.
COUNT = 200_000
CELLS = 64


@pytest.mark.parametrize("samples", [1, 2, 3, 65_535, 65_536, 65_537, 70_000, 99_856, 262_144])
def test_each_sample_once_an_epoch(samples: int) -> None:
    """Each epoch has each sample once, for sizes around the change of method; epochs differ."""
    # Squares and powers of two are among the sizes.
    first, second = (epoch_permutation(samples, 7, epoch)(np.arange(samples)) for epoch in (0, 1))
    for found in (first, second):
        assert np.array_equal(np.sort(found), np.arange(samples))
    assert samples < 4 or not np.array_equal(first, second)


def test_the_network_permutes_any_number() -> None:
    """The Feistel network permutes any number of samples."""
    # For small numbers, much of the rectangle is outside the data set.
    for samples in range(1, 300):
        assert sorted(FeistelPermutation(samples, 1, 2)(np.arange(samples)).tolist()) == list(
            range(samples)
        ), samples


def test_the_order_of_a_seed_stands() -> None:
    """The order of a seed does not change between versions."""
    # Checkpoints depend on it: a change needs a new name in order.py, and a line in CHANGELOG.
    # This one is NumPy's.
    assert epoch_permutation(5, 42, 0)(np.arange(5)).tolist() == [1, 4, 3, 0, 2]
    # This one is the Feistel network's.
    computed = [194446371, 81501990, 464369328, 20904739, 215825597]
    assert epoch_permutation(500_000_000, 42, 3)(np.arange(5)).tolist() == computed


def test_places_count_on_from_epoch_to_epoch() -> None:
    """A batch that spans two epochs is the same alone and after others."""
    order = SampleOrder(70_000, 7)
    last = [69_998, 69_999, 70_000, 70_001, 140_000]
    found = order.sample_epochs_at(last)
    assert [each.epoch for each in found] == [0, 0, 1, 1, 2]
    expected = [
        epoch_permutation(70_000, 7, place // 70_000)(np.array([place % 70_000]))[0]
        for place in last
    ]
    assert [each.sample_index for each in found] == expected
    # A new order that starts at each of these places.
    assert [SampleOrder(70_000, 7).sample_epochs_at([place])[0] for place in last] == found


def test_half_a_thousand_million_samples_take_no_memory() -> None:
    """The order of 500 million samples takes less than 2 MB."""
    # NumPy's permutation of them would take 4 GB.
    order = SampleOrder(500_000_000, 7)
    tracemalloc.start()
    order.sample_epochs_at(list(range(499_999_000, 500_001_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


# ---------------------------------------------------------------------------------------------------- as random as


def excess(counts: np.ndarray[Any, Any]) -> float:
    """Return the chi-square of equal cells, in standard deviations above its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def cells(rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the count of each pair of cells."""
    return np.bincount(rows * CELLS + columns, minlength=CELLS * CELLS)


def numpys(seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(COUNT)


def ours(seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return epoch_permutation(COUNT, seed, epoch)(np.arange(COUNT))


@pytest.mark.parametrize("make", [numpys, ours])
def test_uniform_serial_and_independent(make: Any) -> None:
    """Places, neighbours, epochs and seeds are independent: chi-squares within 4 sigma."""
    # NumPy's permutation passes the same tests, which shows that they are fair.
    place = np.arange(COUNT)
    order = make(1, 0)
    next_epoch = make(1, 1)
    next_seed = make(2, 0)
    to = order * CELLS // COUNT
    pairs = {
        "place": place * CELLS // COUNT,
        "neighbour": np.roll(to, -1),
        # The rectangle has about 448 columns.
        "row above": np.roll(to, -448),
        "epoch": next_epoch * CELLS // COUNT,
        "seed": next_seed * CELLS // COUNT,
        "low digits": place % CELLS,
    }
    found = {name: excess(cells(to, other)) for name, other in pairs.items()}
    found["low digits of both"] = excess(cells(order % CELLS, place % CELLS))
    found["low digits of neighbours"] = excess(cells(order % CELLS, np.roll(order, -1) % CELLS))
    assert {name: value for name, value in found.items() if abs(value) > 4} == {}


@pytest.mark.parametrize("make", [numpys, ours])
def test_distances_and_rises(make: Any) -> None:
    """Rises, runs of rises and fixed points are as frequent as in a random order."""
    order = make(3, 0)
    rises = int((np.diff(order) > 0).sum())
    assert abs(rises - (COUNT - 1) / 2) < 4 * np.sqrt((COUNT + 1) / 12)
    lengths = Counter(len(list(run)) for up, run in itertools.groupby(np.diff(order) > 0) if up)
    assert abs(sum(lengths.values()) - COUNT / 3) < 4 * np.sqrt(2 * COUNT / 45)
    # A random order has one fixed point on average.
    assert (order == np.arange(COUNT)).sum() <= 6


def test_large_data_sets_too() -> None:
    """A part of the order of 5e8 samples is spread evenly over the data, by high and low digits."""
    found = FeistelPermutation(500_000_000, 42, 0)(np.arange(123_456_789, 123_456_789 + 200_000))
    assert len(set(found.tolist())) == 200_000
    assert abs(excess(np.bincount(found * 1000 // 500_000_000, minlength=1000))) < 4
    assert abs(excess(np.bincount(found % 997, minlength=997))) < 4


def test_a_checkpoint_names_the_order() -> None:
    """The identity names the stored order and the computed order by different names."""
    assert [data_identity_record(range(count))["order"] for count in (65_536, 65_537)] == [
        "shuffle",
        "feistel",
    ]

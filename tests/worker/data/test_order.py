"""The order of samples: each once an epoch, as random as NumPy's permutation, in constant memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ortlaunch.worker.data.identity import identity
from ortlaunch.worker.data.order import Feistel, Order, permutation

COUNT = 200_000
CELLS = 64


@pytest.mark.parametrize("samples", [1, 2, 3, 65_535, 65_536, 65_537, 70_000, 99_856, 262_144])
def test_each_sample_once_an_epoch(samples: int) -> None:
    """On both sides of the size from which nothing is held, squares and powers of two among them; epochs differ."""
    first, second = (permutation(samples, 7, epoch)(np.arange(samples)) for epoch in (0, 1))
    for found in (first, second):
        assert np.array_equal(np.sort(found), np.arange(samples))
    assert samples < 4 or not np.array_equal(first, second)


def test_the_network_permutes_any_number() -> None:
    """Also where much of the rectangle lies beside the data set."""
    for samples in range(1, 300):
        assert sorted(Feistel(samples, 1, 2)(np.arange(samples)).tolist()) == list(
            range(samples)
        ), samples


def test_the_order_of_a_seed_stands() -> None:
    """Checkpoints count on it: a change here is a new name in order.py, and a line in CHANGELOG."""
    assert permutation(5, 42, 0)(np.arange(5)).tolist() == [1, 4, 3, 0, 2]  # NumPy's
    computed = [194446371, 81501990, 464369328, 20904739, 215825597]
    assert permutation(500_000_000, 42, 3)(np.arange(5)).tolist() == computed


def test_places_count_on_from_epoch_to_epoch() -> None:
    """A batch that spans two of them, asked for alone or after others."""
    order = Order(70_000, 7)
    last = [69_998, 69_999, 70_000, 70_001, 140_000]
    found = order.at(last)
    assert [epoch for _, epoch in found] == [0, 0, 1, 1, 2]
    expected = [
        permutation(70_000, 7, place // 70_000)(np.array([place % 70_000]))[0] for place in last
    ]
    assert [index for index, _ in found] == expected
    assert [Order(70_000, 7).at([place])[0] for place in last] == found


def test_half_a_thousand_million_samples_take_no_memory() -> None:
    """NumPy's permutation of them is 4 GB."""
    order = Order(500_000_000, 7)
    tracemalloc.start()
    order.at(list(range(499_999_000, 500_001_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


# ---------------------------------------------------------------------------------------------------- as random as


def excess(counts: np.ndarray[Any, Any]) -> float:
    """Chi-square of equal cells, in standard deviations above its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def cells(rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How often each pair of cells comes."""
    return np.bincount(rows * CELLS + columns, minlength=CELLS * CELLS)


def numpys(seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(COUNT)


def ours(seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return permutation(COUNT, seed, epoch)(np.arange(COUNT))


@pytest.mark.parametrize("make", [numpys, ours])
def test_uniform_serial_and_independent(make: Any) -> None:
    """Where from and where to, neighbours, samples far apart, epochs and seeds: chi-squares within four deviations."""
    place = np.arange(COUNT)
    order = make(1, 0)
    next_epoch = make(1, 1)
    next_seed = make(2, 0)
    to = order * CELLS // COUNT
    pairs = {
        "place": place * CELLS // COUNT,
        "neighbour": np.roll(to, -1),
        "row above": np.roll(to, -448),  # across the rectangle
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
    """Rises are half of the steps, runs up have the lengths of chance, and few samples stay where they are."""
    order = make(3, 0)
    rises = int((np.diff(order) > 0).sum())
    assert abs(rises - (COUNT - 1) / 2) < 4 * np.sqrt((COUNT + 1) / 12)
    lengths = Counter(len(list(run)) for up, run in itertools.groupby(np.diff(order) > 0) if up)
    assert abs(sum(lengths.values()) - COUNT / 3) < 4 * np.sqrt(2 * COUNT / 45)
    assert (order == np.arange(COUNT)).sum() <= 6  # 1 by chance


def test_large_data_sets_too() -> None:
    """A stretch of 5e8 samples' order falls evenly over the whole corpus, by high and by low digits."""
    found = Feistel(500_000_000, 42, 0)(np.arange(123_456_789, 123_456_789 + 200_000))
    assert len(set(found.tolist())) == 200_000
    assert abs(excess(np.bincount(found * 1000 // 500_000_000, minlength=1000))) < 4
    assert abs(excess(np.bincount(found % 997, minlength=997))) < 4


def test_a_checkpoint_names_the_order() -> None:
    """What is held and what is computed are two orders of one seed."""
    assert [identity(range(count))["order"] for count in (65_536, 65_537)] == ["shuffle", "feistel"]

"""Mixtures: the share of each source, the order of samples, and mixtures in a recipe."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import Batches, LoadedData, Mixture, UserSamples
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.mixture import BLOCK, MixedOrder, block_position_count_by_source
from ortlaunch.worker.data.order import SampleEpoch
from tests.makers import recipe

# Sources of very different sizes: the small ones are repeated often.
SIZES = [1000, 50, 7]
WEIGHTS = [6.0, 3.0, 1.0]
PLACES = 3 * BLOCK


@pytest.fixture(scope="module")
def taken() -> list[SampleEpoch]:
    """Return (sample, epoch of its source) at each place of three blocks."""
    return MixedOrder(SIZES, WEIGHTS, 7).sample_epochs_at(list(range(PLACES)))


@pytest.fixture(scope="module")
def sources(taken: list[SampleEpoch]) -> NDArray[np.int64]:
    """Return the number of the source at each of these places."""
    samples = np.array(taken)[:, 0]
    return np.searchsorted(np.cumsum(SIZES), samples, side="right")


@pytest.mark.parametrize("steps", [100, 1000, 8192, BLOCK + 5000, PLACES])
def test_weights_are_hit_within_three_deviations(sources: NDArray[np.int64], steps: int) -> None:
    """Each source has its share, within 3 sigma of a random draw, after any number of steps."""
    counts = np.bincount(sources[:steps], minlength=len(SIZES))
    for number, weight in enumerate(WEIGHTS):
        share = weight / sum(WEIGHTS)
        assert abs(counts[number] - steps * share) <= 3 * math.sqrt(steps * share * (1 - share))


def test_sources_are_shuffled_among_each_other(sources: NDArray[np.int64]) -> None:
    """A source follows itself as often as in a random order."""
    first = sources == 0
    pairs = int((first[1:] & first[:-1]).sum())
    # The largest source has a share of 0.6.
    chance = 0.36
    assert abs(pairs - PLACES * chance) < 4 * math.sqrt(PLACES * chance * (1 - chance))


def test_an_epoch_of_a_source_has_each_of_its_samples_once(
    taken: list[SampleEpoch], sources: NDArray[np.int64]
) -> None:
    """An epoch of a source has each sample once; the next epoch follows in another order."""
    for number, (size, begin) in enumerate(zip(SIZES, (0, 1000, 1050))):
        pairs = np.array([each[:2] for each in taken])
        mine = [(sample - begin, epoch) for sample, epoch in pairs[sources == number]]
        assert [epoch for _, epoch in mine] == [place // size for place in range(len(mine))]
        epochs = [[sample for sample, _ in mine[start : start + size]] for start in (0, size)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 2
        assert epochs[0] != epochs[1]


def test_any_place_is_known_without_those_before_it(taken: list[SampleEpoch]) -> None:
    """Any place is computed alone, in constant memory, also far from the beginning."""
    # A resumed run begins in the middle.
    chosen = [0, BLOCK - 1, BLOCK, 2 * BLOCK + 17]
    assert [MixedOrder(SIZES, WEIGHTS, 7).sample_epochs_at([place])[0] for place in chosen] == [
        taken[place] for place in chosen
    ]
    tracemalloc.start()
    # 300 places after 10**12 others.
    found = MixedOrder([5 * 10**8, 10**9], [1, 3], 7).sample_epochs_at(
        list(range(10**12, 10**12 + 300))
    )
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert len(set(found)) == 300


def test_shares_fill_a_block() -> None:
    """Shares of a block are within one place of the weights, and their sum is the block."""
    for weights in ([1.0], [1, 1, 1], [0.1, 0.2, 0.7], [1e-3, 1e9 / 65_537, 1e9]):
        found = block_position_count_by_source(weights)
        assert found.sum() == BLOCK
        assert np.abs(found - np.array(weights) / sum(weights) * BLOCK).max() < 1


def test_one_sequence_on_any_world() -> None:
    """1, 2 and 4 ranks have the same samples in each step."""

    def steps(ranks: int, micro: int) -> list[list[int]]:
        mixture = Mixture(
            [UserSamples([{"x": 100 * n + i} for i in range(9)]) for n in (0, 1)], [2, 1]
        )
        batches = Batches(mixture, BatchPlan(16, micro, 16 // (micro * ranks), ranks, None), 7)
        return [
            [mixture.sample(i, 0)["x"] for i in batches.sample_indices_of_step(step)]
            for step in range(6)
        ]

    # `sample_indices_of_step` goes pass by pass and rank by rank, so that the order is compared, too.
    assert steps(1, 4) == steps(2, 4) == steps(4, 4) == steps(4, 2)


def test_from_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture has one tokenizer and one fingerprint; a repeated corpus has other masks."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n\n" * 40)
    (tmp_path / "b.txt").write_text("ein hund stand im wald\n\n" * 20)
    a, b = ({"format": "text", "path": [str(tmp_path / f"{name}.txt")]} for name in "ab")
    train = [{"source": a, "weight": 1}, {"source": b, "weight": 3}, {"source": a}]
    words = {"train": "wordpiece", "vocab_size": 300}
    model = {"task": "masked-lm", "config": {"model_type": "bert"}}
    data = LoadedData(
        recipe(model=model, data={"train": train, "tokenizer": words, "sequence_length": 16})
    )
    assert isinstance(data.train, Mixture)
    assert {"mat", "wald"} <= set(data.tokenizer.get_vocab())
    # The first and the third source are the same corpus.
    first, _, third = data.train.parts
    assert len(first) == len(third)
    assert any(
        first.sample(i, 0)["labels"].tolist() != third.sample(i, 0)["labels"].tolist()
        for i in range(4)
    )
    assert len(data.train) == sum(map(len, data.train.parts))
    found = data_identity_record(data.train)
    assert found["order"] == "mixture of shuffle, shuffle, shuffle"
    assert found["fingerprint"] not in (None, data_identity_record(first)["fingerprint"])

"""Samples of T5's pretraining: run_t5_mlm_flax.py's rules, on masks of ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import SpanCorruption
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.masked.span_corruption import CorruptedSpans, _random_segment_lengths
from ortlaunch.worker.data.order import SampleEpoch

# As T5's: the marks are the last tokens, the first of them the very last.
_VOCABULARY = 1000
_END = 1


class _Tokenizer:
    eos_token_id = _END

    def get_vocab(self) -> dict[str, int]:
        return {f"<extra_id_{n}>": _VOCABULARY - 1 - n for n in range(100)}


def corrupted(length: int, tokens: int = 5000, **settings: Any) -> CorruptedSpans:
    text = np.arange(tokens, dtype=np.uint32) % 800 + 2
    tokenizer: Any = _Tokenizer()
    return CorruptedSpans(text, length, tokenizer, SpanCorruption(**settings), 7)


# compute_input_and_target_lengths of run_t5_mlm_flax.py.
def lengths_of_flax(inputs_length: int, density: float, mean: float) -> tuple[int, int]:
    def lengths(tokens_length: int) -> tuple[int, int]:
        noise = round(tokens_length * density)
        spans = round(noise / mean)
        return tokens_length - noise + spans + 1, noise + spans + 1

    tokens_length = inputs_length
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    return tokens_length, lengths(tokens_length)[1]


# create_sentinel_ids and filter_input_ids of the same script, for one row.
def filtered_by_flax(ids: NDArray[Any], mask: NDArray[Any]) -> list[int]:
    mask = mask.astype(np.int8)
    start = mask - np.roll(mask, 1) * mask
    start[0] = mask[0]
    sentinels = np.where(start != 0, np.cumsum(start), start)
    sentinels = np.where(sentinels != 0, _VOCABULARY - sentinels, 0)
    sentinels = sentinels - (mask - start)
    full = np.where(sentinels != 0, sentinels, ids)
    return [*full[full >= 0].tolist(), _END]


@pytest.mark.parametrize(
    ("length", "density", "mean"),
    [(512, 0.15, 3.0), (128, 0.15, 3.0), (33, 0.15, 3.0), (64, 0.3, 5.0), (48, 0.2, 2.0)],
)
def test_samples_are_those_of_run_t5_mlm(length: int, density: float, mean: float) -> None:
    """Inputs and labels are what the script makes of the same spans, with its lengths and counts."""
    samples = corrupted(length, noise_density=density, mean_span_length=mean)
    tokens, target_length = lengths_of_flax(length, density, mean)
    batch = samples.batch([SampleEpoch(index, 1) for index in range(3)])
    assert len(samples) == 5000 // tokens
    assert batch["labels"].shape == (3, target_length)
    for index in range(3):
        ids = (np.arange(tokens) + index * tokens) % 800 + 2
        inputs, labels = batch["input_ids"][index].tolist(), batch["labels"][index].tolist()
        kept = {token for token in inputs if token < 802}
        mask = np.array([token not in kept for token in ids])
        assert mask.sum() == round(tokens * density)
        assert filtered_by_flax(ids, mask) == inputs
        assert filtered_by_flax(ids, ~mask) == labels
        assert len(inputs) <= length


def test_all_divisions_are_equally_likely() -> None:
    """Segments are drawn as by shuffling the places where one begins."""
    draws = np.random.default_rng(0).random((6000, 4))
    counts = Counter(tuple(_random_segment_lengths(row, 3).tolist()) for row in draws)
    # 5 items in 3 segments: 6 ways.
    assert len(counts) == 6
    assert all(sum(each) == 5 and abs(count - 1000) < 120 for each, count in counts.items())


def test_spans_differ_by_epoch_alone() -> None:
    """A sample depends on seed, index and epoch, whatever batch it is in."""
    samples = corrupted(64)
    batch = samples.batch([SampleEpoch(3, 0), SampleEpoch(5, 0)])
    assert torch.equal(batch["labels"][1], samples.sample(5, 0)["labels"])
    assert not torch.equal(batch["labels"][1], samples.sample(5, 1)["labels"])


def test_a_tokenizer_without_marks() -> None:
    """The error has the tokens that a sample needs."""
    with pytest.raises(
        DataError,
        match=r"has no <extra_id_100>; a sample of 2048 .* to <extra_id_113> \(data.added",
    ):
        corrupted(2048)

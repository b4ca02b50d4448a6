"""Packs of chats: whole, apart, as full as first-fit decreasing, and in an order that resumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.worker.data import IGNORED, ChatSamples, Mixture, collate
from ortlaunch.worker.data.chats.samples import ANSWER
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.mixture import split_held_out_samples
from ortlaunch.worker.data.packed_samples import (
    PackedSamples,
    bin_by_item_of_first_fit_decreasing,
    pack_chats_if_requested,
)
from ortlaunch.worker.data.token_cache import Documents
from ortlaunch.worker.model.model import LossModule
from tests.ort import needs_ort
from tests.worker.model.test_packing import model

LENGTH = 24
SIZES = [5, 20, 3, 24, 7, 2, 2, 11, 9, 16, 4]


def chats(sizes: list[int] | None = None) -> ChatSamples:
    """Return chats of random tokens; the second half of each is its answer."""
    sizes = sizes or SIZES
    tokens = np.random.default_rng(0).integers(3, 60, sum(sizes)).astype(np.uint32)
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes):
        tokens[end - size // 2 : end] |= np.uint32(ANSWER)
    return ChatSamples(Documents(tokens, ends), LENGTH, 0, "data.train")


@pytest.mark.parametrize("seed", range(20))
def test_packs_are_those_of_first_fit_decreasing(seed: int) -> None:
    """Bins equal those of the plain algorithm, item by item."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, random.integers(2, 60), 200)
    left: list[int] = []
    expected = np.empty(200, int)
    for item in np.argsort(-sizes, kind="stable"):
        bins = [number for number, room in enumerate(left) if room >= sizes[item]]
        if not bins:
            left.append(64)
            bins = [len(left) - 1]
        left[bins[0]] -= sizes[item]
        expected[item] = bins[0]
    assert bin_by_item_of_first_fit_decreasing(sizes, 64).tolist() == expected.tolist()


def test_nothing_is_cut_and_documents_are_apart() -> None:
    """Each chat is in one pack with its labels, at positions from 0; padding has no label."""
    alone = chats()
    packs = PackedSamples(alone, LENGTH, "data.train")
    assert take_cache_notes()[-1] == (
        "data.train: 11 chats are packed into 5 samples of 24 tokens, 85.8% of them filled"
    )
    found = []
    for index in range(len(packs)):
        sample = packs.sample(index, 0)
        for number in sample["document_ids"].unique().tolist():
            of = sample["document_ids"] == number
            assert sample["position_ids"][of].tolist() == list(range(int(of.sum())))
            if (sample["labels"][of] != IGNORED).any():
                found.append((sample["input_ids"][of].tolist(), sample["labels"][of].tolist()))
            else:
                assert not sample["input_ids"][of].any()
    expected = []
    for index, size in enumerate(SIZES):
        sample = alone.sample(index, 0)
        labels = [IGNORED, *sample["labels"][1:size].tolist()]
        expected.append((sample["input_ids"][:size].tolist(), labels))
    assert sorted(found) == sorted(expected)


def test_rows_are_held_out_before_they_are_packed() -> None:
    """A held-out number is of rows, a mixture is packed by source, and the identity has both."""
    from ortlaunch.recipe.fields.data import Data

    data = Data(train="python-chats", packing=True, sequence_length=LENGTH, tokenizer="here")
    kept, held = split_held_out_samples(
        Mixture([chats(), chats(SIZES[::-1])], [1.0, 3.0]), HeldOut(samples=6), 0
    )
    packs = pack_chats_if_requested(kept, data, "data.train")
    assert isinstance(packs, Mixture)
    assert [len(part.members) for part in packs.parts if isinstance(part, PackedSamples)] == [8, 8]
    # The recipe's weight is a number.
    assert packs.weights == [1.0, 3.0]
    assert data_identity_record(packs)["held_out"] == data_identity_record(kept)["held_out"] == 6
    assert len(pack_chats_if_requested(held, data, "data.evaluation")) < len(held)


def passes(module: Any, net: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the loss and all gradients of a batch."""
    net.zero_grad()
    loss = module(**batch)
    loss.backward()
    return loss.item(), torch.cat(
        [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    )


def batches() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the same chats as one batch of rows, and as one of packs."""
    alone = chats()
    packs = PackedSamples(alone, LENGTH, "data.train")
    take_cache_notes()
    both = (collate([of.sample(index, 0) for index in range(len(of))]) for of in (alone, packs))
    first, second = both
    return first, second


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("gpt2", "eager")]
)
def test_packed_equals_unpacked(family: str, attention: str) -> None:
    """Loss and gradients of packs equal those of single rows in plain PyTorch, in float64."""
    net = model(family, attention).eval().double()
    (rows, row_gradients), (packs, pack_gradients) = (
        passes(LossModule(net), net, batch) for batch in batches()
    )
    assert packs == pytest.approx(rows, rel=1e-6)
    assert (pack_gradients - row_gradients).abs().max() < 1e-6 * row_gradients.abs().max()


@needs_ort
def test_packed_equals_unpacked_on_onnx_runtime(witness: Any) -> None:
    """They are equal in ORT's graph, too."""
    from ortmodule import ORTModule

    net = model(attention="sdpa").eval()
    (expected, row_gradients), (found, gradients) = (
        passes(ORTModule(LossModule(net)), net, batch) for batch in batches()
    )
    assert found == pytest.approx(expected, rel=1e-6)
    assert (gradients - row_gradients).abs().max() < 1e-6 * row_gradients.abs().max()
    assert witness.pass_and_graph_counts_record()["forward_passes"] == 2

"""Samples of text tasks: masked blocks, pairs of segments, packed blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.testing import assert_close

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe.fields.data import HeldOut, MaskedLm
from ortlaunch.worker.data import (
    IGNORED,
    Batches,
    MaskedBlocks,
    Masking,
    Mixture,
    SentencePairs,
    TokenWindows,
    collate,
)
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.masked.masked_packs import MaskedPacks
from ortlaunch.worker.data.mixture import split_held_out_samples
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.token_cache import Documents

# Ids of the special tokens, and the size of the vocabulary.
CLS = 1
SEP = 2
MASK = 3
WORDS = 400


class Words:
    """The part of a tokenizer that masking uses."""

    cls_token = "[CLS]"
    sep_token = "[SEP]"
    mask_token = "[MASK]"
    cls_token_id = CLS
    sep_token_id = SEP
    mask_token_id = MASK

    def __len__(self) -> int:
        return WORDS


class Pieces(Words):
    """Every third token continues a word."""

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [f"##{number}" if number % 3 == 0 else str(number) for number in ids]


def corpus(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random token ids above the special ones."""
    return np.random.default_rng(seed).integers(10, WORDS, tokens).astype(np.uint32)


# ----------------------------------------------------------------------------------------------------- masking


def masked(seed: int = 0, pairs: bool = False, tokens: int = 60_000, **settings: Any) -> Any:
    """Return windows, or pairs of documents with 6,100 tokens (a hundred full samples each)."""
    masking = Masking(Words(), MaskedLm(**settings))
    if pairs:
        return documents_of([6100] * (tokens // 6100), seed, masking)
    return MaskedBlocks(corpus(tokens), 64, masking, seed)


def documents_of(sizes: list[int], seed: int = 0, masking: Any = None) -> SentencePairs:
    """Return pairs of documents of these sizes."""
    found = Documents(corpus(sum(sizes)), np.cumsum(sizes))
    return SentencePairs(found, 64, masking or Masking(Words(), MaskedLm()), 0, seed)


def original(sample: Any) -> torch.Tensor:
    """Return the input before masking."""
    return torch.where(sample["labels"] == IGNORED, sample["input_ids"], sample["labels"])


def test_masked_packs_hold_documents_with_their_marks() -> None:
    """Each piece is [CLS] piece [SEP] with positions of its own; every token is in one pack."""
    sizes = [40, 0, 1, 62, 130, 7]
    tokens = corpus(sum(sizes))
    packs = MaskedPacks(Documents(tokens, np.cumsum(sizes)), 64, Masking(Words(), MaskedLm()), 0, 0)
    batch = packs.batch([SampleEpoch(index, 0) for index in range(len(packs))])
    pieces = []
    for row in range(len(packs)):
        ids = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])[row]
        documents = batch["document_ids"][row]
        for document in range(int(documents.max()) + 1):
            place = documents == document
            positions = batch["position_ids"][row][place]
            assert positions.tolist() == [*range(int(place.sum()))]
            piece = ids[place].tolist()
            if piece[0] == 0:
                assert not any(piece)
                assert (batch["labels"][row][place] == IGNORED).all()
                continue
            assert (piece[0], piece[-1]) == (CLS, SEP)
            assert not {CLS, SEP} & {*batch["labels"][row][place].tolist()}
            pieces.append(piece[1:-1])
    begins = np.cumsum([0, *sizes])
    expected = [
        tokens[at : min(at + 62, end)].tolist()
        for begin, end in zip(begins, begins[1:])
        for at in range(begin, end, 62)
    ]
    assert sorted(pieces) == sorted(expected)
    assert len(packs) == 4
    again = packs.sample(1, 0)
    assert all(torch.equal(again[name], batch[name][1]) for name in batch)
    assert not torch.equal(packs.sample(1, 1)["input_ids"], again["input_ids"])


def test_whole_words_end_with_their_piece() -> None:
    """A word that a pack's next piece seems to continue is not masked with it."""
    documents = Documents(np.array([20, 201, 204, 205], np.uint32), np.array([2, 4]))
    masking = Masking(Pieces(), MaskedLm(whole_words=True, probability=0.25))
    packs = MaskedPacks(documents, 16, masking, 0, 0)
    found = [packs.sample(0, epoch)["labels"].tolist() for epoch in range(20)]
    assert {tuple(labels[1:7]) for labels in found} == {
        (20, 201, IGNORED, IGNORED, IGNORED, IGNORED),
        (IGNORED, IGNORED, IGNORED, IGNORED, 204, 205),
    }


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("settings", "predictions"),
    [
        # 15 % of 64, rounded.
        ({}, 10),
        ({"max_predictions": 4}, 4),
        ({"max_predictions": 40}, 10),
        ({"probability": 0.001}, 1),
        ({"probability": 0.99}, None),
    ],
)
def test_every_sample_has_the_same_number_of_predictions(
    pairs: bool, settings: dict[str, Any], predictions: int | None
) -> None:
    """Every sample has the same number of predictions, none of [CLS] or [SEP]."""
    # So the mean over micro batches is the mean over the batch.
    samples = masked(pairs=pairs, **settings)
    expected = predictions or samples.body
    for index in range(40):
        sample = samples.sample(index, epoch=0)
        labels = sample["labels"]
        assert int((labels != IGNORED).sum()) == expected
        assert not set(labels[labels != IGNORED].tolist()) & {CLS, SEP, MASK}
        assert len(sample["input_ids"]) == len(labels) == 64


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "transformers"])
def test_masked_words_are_80_10_10(theirs: bool) -> None:
    """Of chosen tokens 80 % are masked, 10 % replaced and 10 % left, as in transformers."""
    # Within 3 sigma, over 10,000 samples.
    samples = masked(tokens=62 * 10_000)
    assert len(samples) == 10_000
    if theirs:
        found, truth = masked_by_transformers(samples.tokens[:500_000])
    else:
        taken = [samples.sample(index, epoch=3) for index in range(10_000)]
        chosen = [sample["labels"] != IGNORED for sample in taken]
        found = torch.cat([sample["input_ids"][places] for sample, places in zip(taken, chosen)])
        truth = torch.cat([sample["labels"][places] for sample, places in zip(taken, chosen)])
        assert len(found) == 10_000 * 10
    # A random replacement may be [MASK] or the token itself, each with probability 1 / WORDS.
    other = (found != MASK) & (found != truth)
    for share, expected in (
        ((found == MASK), 0.8 + 0.1 / WORDS),
        ((found == truth), 0.1 + 0.1 / WORDS),
        (other, 0.1 * (1 - 2 / WORDS)),
    ):
        assert (
            abs(float(share.float().mean()) - expected)
            < 3 * (expected * (1 - expected) / len(found)) ** 0.5
        )
    # Replacements come from the whole vocabulary.
    assert found[other].min() < 20
    assert found[other].max() > WORDS - 20


def masked_by_transformers(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that DataCollatorForLanguageModeling chose, and the original ones."""
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = {**{f"w{number}": number for number in range(WORDS)}, "[MASK]": MASK}
    del names[f"w{MASK}"]
    backend = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
    inputs = torch.from_numpy(tokens.astype(np.int64)).reshape(-1, 100)
    found, labels = collator.torch_mask_tokens(inputs.clone(), torch.zeros_like(inputs))
    return found[labels != IGNORED], labels[labels != IGNORED]


def test_every_place_is_chosen_alike() -> None:
    """Every position of the sequence is chosen equally often, within 5 sigma."""
    samples = masked()
    counts = sum(
        (samples.sample(i, epoch=0)["labels"] != IGNORED).int() for i in range(len(samples))
    )
    assert isinstance(counts, torch.Tensor)
    # 10 predictions on 62 positions; the first and the last are [CLS] and [SEP].
    expected = len(samples) * 10 / 62
    assert counts[[0, 63]].tolist() == [0, 0]
    assert (counts[1:63] - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize("pairs", [False, True])
def test_masking_is_a_function_of_seed_epoch_and_index(pairs: bool) -> None:
    """The masks of a sample depend on seed, epoch and index, not on the order of requests."""

    def ids(samples: Any, index: int, epoch: int) -> list[int]:
        return list(samples.sample(index, epoch)["input_ids"].tolist())

    first = masked(pairs=pairs)
    second = masked(pairs=pairs)
    forward = [ids(first, i, 2) for i in range(9)]
    assert [ids(second, i, 2) for i in reversed(range(9))] == forward[::-1]
    assert ids(first, 4, 3) != forward[4]
    assert ids(masked(seed=1, pairs=pairs), 4, 2) != forward[4]


def whole_words() -> Any:
    """Return windows with whole-word masking, in which every third token id continues a word."""
    return MaskedBlocks(corpus(60_000), 64, Masking(Pieces(), MaskedLm(whole_words=True)), 0)


def pairs_of_all_lengths(seed: int = 0) -> SentencePairs:
    """Return pairs of documents of many lengths; some samples have padding."""
    return documents_of(np.random.default_rng(1).integers(0, 400, 300).tolist(), seed)


@pytest.mark.parametrize(
    "samples",
    [
        masked(),
        whole_words(),
        pairs_of_all_lengths(),
        Mixture([pairs_of_all_lengths(), pairs_of_all_lengths(1)], [1, 1]),
    ],
    ids=["blocks", "whole words", "pairs", "mixture"],
)
def test_a_micro_batch_is_its_samples(samples: Any) -> None:
    """A micro batch equals its samples made one by one, in the requested order."""
    places = [
        SampleEpoch(int(index), number % 3)
        for number, index in enumerate(np.linspace(len(samples) - 1, 0, 40))
    ]
    assert_close(
        samples.batch(places),
        collate([samples.sample(*place[:2]) for place in places]),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_share_of_masked_tokens_follows_the_step(ranks: int) -> None:
    """It goes in equal steps to its final value, from any step on, and in an evaluation is that."""
    settings = {"probability": 0.3, "final_probability": 0.15, "final_step": 4}
    parts = [split_held_out_samples(masked(seed, **settings), HeldOut(share=0.1), 0).training
             for seed in (0, 1)]  # fmt: skip
    sizes = BatchPlan(8, 2, 4 // ranks, ranks, None)
    found = {}
    # The second reader begins at step 3, as a resumed run.
    for first_step in (0, 3):
        batches = Batches(Mixture(parts, [1, 1]), sizes, 5)
        for step in range(first_step, 6):
            passes = [batches.read_micro_batch_and_count_tokens(step, n, rank)
                      for n in range(4 // ranks) for rank in range(ranks)]  # fmt: skip
            labels = torch.cat([each["labels"] for each in passes])
            assert torch.equal(found.setdefault(step, labels), labels)
    shares = [0.3 + (0.15 - 0.3) * min(step / 4, 1) for step in range(6)]
    counts = [(found[step] != IGNORED).sum(1).unique().tolist() for step in range(6)]
    assert counts == [[round(64 * share)] for share in shares]
    assert (parts[0].sample(0, 0)["labels"] != IGNORED).sum() == round(64 * 0.15)


def test_masked_blocks_follow_each_other() -> None:
    """Before masking, samples are [CLS] tokens [SEP], with all tokens of the corpus in order."""
    samples = masked()
    texts = [original(samples.sample(i, epoch=0)) for i in range(len(samples))]
    assert {(int(text[0]), int(text[-1])) for text in texts} == {(CLS, SEP)}
    words = torch.cat([text[1:-1] for text in texts]).numpy()
    np.testing.assert_array_equal(words, samples.tokens[: len(words)])
    # Only the rest that fills no window is missing.
    assert len(samples.tokens) - len(words) < samples.body


def test_pairs_are_two_segments_that_follow_each_other_or_not() -> None:
    """Half of the second segments follow the first; the others are of another document."""
    # Within 3 sigma, over 10,000 samples of documents of many lengths.
    sizes = np.random.default_rng(1).integers(0, 400, 300).tolist()
    samples = documents_of([*sizes, 0, 1, 2, 3])
    # Every token is different, so that its place is known.
    marked = np.arange(10, 10 + len(samples.tokens))
    samples.tokens = marked.astype(np.uint32)
    unrelated = []
    seen = set()
    full = 0
    for number in range(10_000):
        epoch, index = divmod(number, len(samples))
        sample = samples.sample(index, epoch)
        size = int(sample["attention_mask"].sum())
        text = original(sample)[:size]
        segments = sample["token_type_ids"]
        ends = torch.nonzero(text == SEP).flatten().tolist()
        assert (int(text[0]), len(ends), ends[1]) == (CLS, 2, size - 1)
        assert segments.tolist() == [0] * (ends[0] + 1) + [1] * (size - 1 - ends[0]) + [0] * (
            64 - size
        )
        assert sample["input_ids"][size:].sum() == 0
        first, second = (
            words.numpy() - 10 for words in (text[1 : ends[0]], text[ends[0] + 1 : -1])
        )
        documents = [
            set(np.searchsorted(samples.ends, words, side="right")) for words in (first, second)
        ]
        # Each segment is of a single document.
        assert [len(each) for each in documents] == [1, 1]
        follows = bool(second[0] == first[-1] + 1) and documents[0] == documents[1]
        assert follows or documents[0] != documents[1]
        assert (np.diff(first) == 1).all()
        assert (np.diff(second) == 1).all()
        assert int(sample["next_sentence_label"]) == int(not follows)
        unrelated.append(int(not follows))
        seen |= {*first, *second} if follows else {*first}
        full += size == 64
    assert abs(np.mean(unrelated) - 0.5) < 3 * 0.5 / 100
    used = sum(size for size in np.diff(samples.ends, prepend=0) if size > 1)
    # Nearly all of the corpus is used.
    assert len(seen) > 0.98 * used
    assert samples.varies
    assert full > 7000
    assert not documents_of([61, 610]).varies


def test_pairs_need_two_documents() -> None:
    """Pairs need two documents; if one is nearly the whole corpus, the other one is used."""
    with pytest.raises(
        DataError, match=r"the corpus has 1 with two tokens or more; data.train.document sets"
    ):
        documents_of([500, 1, 0])
    # Nearly every random draw gives the large document, so that its neighbor with tokens is used.
    samples = documents_of([100_000, 0, 5])
    assert {int(samples.sample(index, 0)["next_sentence_label"]) for index in range(50)} == {0, 1}


@pytest.mark.parametrize(
    ("length", "most", "published"), [(128, 20, 19), (512, 80, 77), (64, 5, 5)]
)
def test_predictions_are_as_many_as_published(length: int, most: int, published: int) -> None:
    """The number of predictions is that of BERT's own script."""
    # min(max_predictions_per_seq, max(1, int(round(len(tokens) * masked_lm_prob)))).
    samples = MaskedBlocks(
        corpus(20_000), length, Masking(Words(), MaskedLm(max_predictions=most)), 0
    )
    assert {
        int((samples.sample(i, 0)["labels"] != IGNORED).sum()) for i in range(len(samples))
    } == {published}


def test_whole_words() -> None:
    """All tokens of a word are predicted or none; each of them has its own replacement."""

    samples = whole_words()
    counts = []
    mixed = 0
    for index in range(300):
        sample = samples.sample(index, 0)
        text = original(sample)
        chosen = sample["labels"] != IGNORED
        for place in range(2, 63):
            if text[place] % 3 == 0:
                assert chosen[place] == chosen[place - 1]
                mixed += bool(chosen[place]) and (sample["input_ids"][place] == MASK) != (
                    sample["input_ids"][place - 1] == MASK
                )
        counts.append(int(chosen.sum()))
    # The last word may not fit, so that some samples have fewer predictions.
    assert max(counts) == 10
    assert np.mean(np.array(counts) == 10) > 0.95
    assert mixed > 20


def test_whole_words_need_marked_pieces() -> None:
    """Whole-word masking refuses a tokenizer whose vocabulary marks no pieces of words."""

    class Plain(Words):
        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return [str(number) for number in ids]

    with pytest.raises(
        DataError,
        match=r"data.masked_lm.whole_words: data.tokenizer does not mark pieces of words with ##",
    ):
        Masking(Plain(), MaskedLm(whole_words=True))


@pytest.mark.parametrize("missing", ["cls_token", "sep_token", "mask_token"])
def test_masking_needs_its_words(missing: str) -> None:
    """A tokenizer without one of the special tokens, such as GPT-2's, is refused by name."""
    words = Words()
    setattr(words, missing, None)
    with pytest.raises(DataError, match=f"data.tokenizer has no {missing}, .*train a wordpiece"):
        Masking(words, MaskedLm())


# ----------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(("tokens", "blocks"), [(640, 10), (639, 9), (7, 0)])
def test_blocks_are_consecutive(tokens: int, blocks: int) -> None:
    """Causal samples are consecutive windows; labels are the inputs, and the mask is all ones."""
    text = corpus(tokens)
    samples = TokenWindows(text, 64, with_mask=True)
    assert len(samples) == blocks
    for index in range(blocks):
        sample = samples.sample(index, epoch=index)
        np.testing.assert_array_equal(
            sample["input_ids"].numpy(), text[64 * index : 64 * (index + 1)]
        )
        assert torch.equal(sample["labels"], sample["input_ids"])
        assert torch.equal(sample["attention_mask"], torch.ones(64, dtype=torch.int64))

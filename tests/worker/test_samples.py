"""One sample of each task from a corpus: masked words, pairs of segments, packed blocks, texts with a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortlaunch.recipe.data import Corpus, MaskedLm
from ortlaunch.worker.data import IGNORED, Blocks, LabelledTexts, MaskedBlocks, Mixture
from ortlaunch.worker.data import labelled as labelled_module
from ortlaunch.worker.data.labelled import number_labels
from ortlaunch.worker.data.reading import DataError

CLS, SEP, MASK, WORDS = 1, 2, 3, 400


class Words:
    """What masking needs of a tokenizer."""

    cls_token, sep_token, mask_token = "[CLS]", "[SEP]", "[MASK]"
    cls_token_id, sep_token_id, mask_token_id = CLS, SEP, MASK

    def __len__(self) -> int:
        return WORDS


def corpus(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Token ids above the special ones."""
    return np.random.default_rng(seed).integers(10, WORDS, tokens).astype(np.uint32)


# ----------------------------------------------------------------------------------------------------- masking


def masked(seed: int = 0, pairs: bool = False, tokens: int = 60_000, **settings: Any) -> MaskedBlocks:
    return MaskedBlocks(corpus(tokens), 64, Words(), MaskedLm(**settings), seed, pairs)


def original(sample: Any) -> torch.Tensor:
    """The input before masking."""
    return torch.where(sample["labels"] == IGNORED, sample["input_ids"], sample["labels"])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("settings", "predictions"),
    [
        ({}, 10),  # 15 % of 64, rounded
        ({"max_predictions": 4}, 4),
        ({"max_predictions": 40}, 10),
        ({"probability": 0.001}, 1),
        ({"probability": 0.99}, None),
    ],
)
def test_every_sample_has_the_same_number_of_predictions(
    pairs: bool, settings: dict[str, Any], predictions: int | None
) -> None:
    """Exactly so many, so that the mean over micro batches is the mean over the batch; never [CLS] or [SEP]."""
    samples = masked(pairs=pairs, **settings)
    expected = predictions or samples.body
    for index in range(40):
        sample = samples.sample(index, epoch=0)
        labels = sample["labels"]
        assert int((labels != IGNORED).sum()) == expected
        assert not set(labels[labels != IGNORED].tolist()) & {CLS, SEP, MASK}
        assert len(sample["input_ids"]) == len(labels) == 64


def test_masked_words_are_80_10_10() -> None:
    """Of the chosen words 80 % are masked, 10 % replaced by words from the whole vocabulary, 10 % left, in 5 sigma."""
    samples = masked()
    inputs, labels = [], []
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=3)
        chosen = sample["labels"] != IGNORED
        inputs.append(sample["input_ids"][chosen])
        labels.append(sample["labels"][chosen])
    found, truth = torch.cat(inputs), torch.cat(labels)
    count = len(found)
    assert count > 9000
    other = (found != MASK) & (found != truth)
    for share, expected in (
        ((found == MASK), 0.8 + 0.1 / WORDS),
        ((found == truth), 0.1 + 0.1 / WORDS),
        (other, 0.1 * (1 - 2 / WORDS)),
    ):
        assert abs(float(share.float().mean()) - expected) < 5 * (expected * (1 - expected) / count) ** 0.5
    assert found[other].min() < 20
    assert found[other].max() > WORDS - 20


def test_every_place_is_chosen_alike() -> None:
    """No place of the sequence is preferred: counts over many samples stay in 5 sigma of even."""
    samples = masked()
    counts = sum((samples.sample(i, epoch=0)["labels"] != IGNORED).int() for i in range(len(samples)))
    assert isinstance(counts, torch.Tensor)
    expected = len(samples) * 10 / 62
    assert counts[[0, 63]].tolist() == [0, 0]
    assert (counts[1:63] - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize("pairs", [False, True])
def test_masking_is_a_function_of_seed_epoch_and_index(pairs: bool) -> None:
    """The same sample in any order of asking and any process; other masks in another epoch or with another seed."""

    def ids(samples: MaskedBlocks, index: int, epoch: int) -> list[int]:
        return list(samples.sample(index, epoch)["input_ids"].tolist())

    first, second = masked(pairs=pairs), masked(pairs=pairs)
    forward = [ids(first, i, 2) for i in range(9)]
    assert [ids(second, i, 2) for i in reversed(range(9))] == forward[::-1]
    assert ids(first, 4, 3) != forward[4]
    assert ids(masked(seed=1, pairs=pairs), 4, 2) != forward[4]


def test_masked_blocks_follow_each_other() -> None:
    """Without masks the samples are [CLS] words [SEP], the words the corpus in order, none left out."""
    samples = masked()
    texts = [original(samples.sample(i, epoch=0)) for i in range(len(samples))]
    assert {(int(text[0]), int(text[-1])) for text in texts} == {(CLS, SEP)}
    words = torch.cat([text[1:-1] for text in texts]).numpy()
    np.testing.assert_array_equal(words, samples.tokens[: len(words)])
    assert len(samples.tokens) - len(words) < samples.body


def test_pairs_are_two_segments_that_follow_each_other_or_not() -> None:
    """[CLS] first [SEP] second [SEP] at full length; half of the seconds, those with label 1, are from elsewhere."""
    samples = masked(pairs=True)
    labels, cuts = [], set()
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=0)
        text, segments = original(sample), sample["token_type_ids"]
        ends = torch.nonzero(text == SEP).flatten().tolist()
        assert (len(text), int(text[0]), len(ends), ends[1]) == (64, CLS, 2, 63)
        assert segments.tolist() == [0] * (ends[0] + 1) + [1] * (63 - ends[0])
        words = torch.cat([text[1 : ends[0]], text[ends[0] + 1 : 63]]).numpy()
        here = samples.tokens[index * samples.body : (index + 1) * samples.body]
        related = bool((words == here).all())
        assert (words[: ends[0] - 1] == here[: ends[0] - 1]).all()
        assert int(sample["next_sentence_label"]) == (0 if related else 1)
        labels.append(int(not related))
        cuts.add(ends[0] - 1)
    assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / len(labels) ** 0.5
    assert (min(cuts), max(cuts)) == (61 // 4, 61 * 3 // 4)


@pytest.mark.parametrize("missing", ["cls_token", "sep_token", "mask_token"])
def test_masking_needs_its_words(missing: str) -> None:
    """A tokenizer without [MASK], as GPT-2's, is refused by name."""
    words = Words()
    setattr(words, missing, None)
    with pytest.raises(DataError, match=f"data.tokenizer has no {missing}, .*train wordpiece"):
        MaskedBlocks(corpus(100), 64, words, MaskedLm(), 0, False)


# ----------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(("tokens", "blocks"), [(640, 10), (639, 9), (7, 0)])
def test_blocks_are_consecutive(tokens: int, blocks: int) -> None:
    """Causal samples are the corpus in order, window by window; labels are the words themselves, the mask all ones."""
    text = corpus(tokens)
    samples = Blocks(text, 64, with_mask=True)
    assert len(samples) == blocks
    for index in range(blocks):
        sample = samples.sample(index, epoch=index)
        np.testing.assert_array_equal(sample["input_ids"].numpy(), text[64 * index : 64 * (index + 1)])
        assert torch.equal(sample["labels"], sample["input_ids"])
        assert torch.equal(sample["attention_mask"], torch.ones(64, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------ labels


def labelled(path: Path, lines: str, **columns: str) -> LabelledTexts:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.write_text(lines)
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")
    return LabelledTexts(Corpus(format="jsonl", path=(str(path),), **columns), tokenizer, 4)


def test_labelled_texts(tmp_path: Path) -> None:
    """Texts are cut or padded to one length, with a mask and their class; no end mark is invented."""
    samples = labelled(
        tmp_path / "x.jsonl",
        '{"body": "a b", "stars": 0}\n{"body": "a b c a b c", "stars": 4}\n',
        text_column="body",
        label_column="stars",
    )
    assert (len(samples), samples.classes) == (2, 5)
    short, long = samples.sample(0, 0), samples.sample(1, 0)
    assert {name: value.tolist() for name, value in short.items()} == {
        "input_ids": [1, 2, 0, 0],
        "attention_mask": [1, 1, 0, 0],
        "labels": 0,
    }
    assert (long["input_ids"].tolist(), int(long["labels"])) == ([1, 2, 3, 1], 4)


GOOD = '{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}', "x.jsonl:1: no column 'label'; it has text"),
        ('{"label": 1}', "x.jsonl:1: no column 'text'; it has label"),
        ('{"text": "a", "label": ""}', "x.jsonl:1: label is ''; a class is a word, or an integer from 0"),
        (GOOD + '{"text": "a", "label": "good"}', "x.jsonl:2: label is 'good', and the first row's is 1; give words"),
        ('{"text": "a", "label": 0.5}', "x.jsonl:1: label is 0.5; a class is a word, or an integer from 0"),
        ('{"text": "a", "label": true}', "x.jsonl:1: label is True; a class is a word, or an integer from 0"),
        ('{"text": ["a", "b"], "label": 1}', r"x.jsonl:1: text is \['a', 'b'\]; it must be text"),
        (GOOD + '{"text": "a", "label": -1}', "x.jsonl:2: label is -1; a class is a word, or an integer from 0"),
        (GOOD + '{"text": "a", "label": null}', "x.jsonl:2: label is None; a class is a word, or an integer from 0"),
        (GOOD * 2 + '{"text": null, "label": 1}', "x.jsonl:3: text is None; it must be text"),
        ("", "x.jsonl: is empty"),
    ],
)
def test_bad_rows_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """A row without text or without a class is told by file and line, and so is that there are none."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines)


def test_words_are_numbered_as_datasets_numbers_them(tmp_path: Path) -> None:
    """By the library's class_encode_column; over all sources of a mixture, and the same in the evaluation."""
    import datasets

    words = ["good", "bad", "very bad", "bad", "Good", "äh"]
    lines = [json.dumps({"text": "a", "label": word}) + "\n" for word in words]
    one, other, held_out = (
        labelled(tmp_path / f"{n}.jsonl", "".join(part)) for n, part in enumerate((lines[:3], lines[3:], lines[1:2]))
    )
    mixture = Mixture([one, other], [1, 1])
    theirs = datasets.Dataset.from_dict({"label": words}).class_encode_column("label")
    assert number_labels(mixture, held_out) == theirs.features["label"].names
    assert [int(mixture.sample(i, 0)["labels"]) for i in range(6)] == theirs["label"][:]
    assert int(held_out.sample(0, 0)["labels"]) == theirs["label"][1]
    assert mixture.classes == 5


def test_labels_that_do_not_go_together(tmp_path: Path) -> None:
    """A word that was never trained, and words beside numbers."""
    word, number, same = (
        labelled(tmp_path / f"{n}.jsonl", "".join(f'{{"text": "a", "label": {label}}}\n' for label in rows))
        for n, rows in enumerate((['"a"', '"b"'], [1, 0], ['"b"', '"b"']))
    )
    unknown = labelled(tmp_path / "c.jsonl", '{"text": "a", "label": "c"}')
    with pytest.raises(DataError, match="words in one source and numbers in another"):
        number_labels(Mixture([word, number], [1, 1]), None)
    with pytest.raises(DataError, match=r"data.evaluation: label 'c' is in no row of data.train, which has 2"):
        number_labels(word, unknown)
    with pytest.raises(DataError, match="every label is 'b'"):
        number_labels(same, None)
    assert number_labels(number, number) == []


def test_no_rows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split without rows has no classes, and is said to be empty."""
    monkeypatch.setattr(labelled_module, "rows", lambda source: iter(()))
    with pytest.raises(DataError, match="the corpus for sequence-classification has no rows"):
        LabelledTexts(Corpus(format="hub", name="some/set"), Words(), 4)

"""One sample of each task from a corpus: masked words, pairs of segments, packed blocks, texts with a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from ortlaunch.recipe.data import Corpus, MaskedLm
from ortlaunch.worker.data import (
    IGNORED,
    Blocks,
    LabelledTexts,
    MaskedBlocks,
    Masking,
    Mixture,
    ScoredTexts,
    SentencePairs,
    TaggedWords,
)  # fmt: skip
from ortlaunch.worker.data import labelled as labelled_module
from ortlaunch.worker.data.labelled import number_labels
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.tokens import Documents

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


def masked(seed: int = 0, pairs: bool = False, tokens: int = 60_000, **settings: Any) -> Any:
    """Windows, or pairs of documents of 6,100 tokens: a hundred full samples each."""
    masking = Masking(Words(), MaskedLm(**settings))
    if pairs:
        return documents_of([6100] * (tokens // 6100), seed, masking)
    return MaskedBlocks(corpus(tokens), 64, masking, seed)


def documents_of(sizes: list[int], seed: int = 0, masking: Any = None) -> SentencePairs:
    """Pairs of documents of these sizes."""
    found = Documents(corpus(sum(sizes)), np.cumsum(sizes))
    return SentencePairs(found, 64, masking or Masking(Words(), MaskedLm()), 0, seed)


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


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "transformers"])
def test_masked_words_are_80_10_10(theirs: bool) -> None:
    """Of the words chosen in 10,000 samples 80 % are masked, 10 % replaced by words from the whole vocabulary and 10 %
    left, in 3 sigma; so are those of transformers' own collator, by the same measure.
    """
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
    other = (found != MASK) & (found != truth)
    for share, expected in (
        ((found == MASK), 0.8 + 0.1 / WORDS),
        ((found == truth), 0.1 + 0.1 / WORDS),
        (other, 0.1 * (1 - 2 / WORDS)),
    ):
        assert abs(float(share.float().mean()) - expected) < 3 * (expected * (1 - expected) / len(found)) ** 0.5
    assert found[other].min() < 20
    assert found[other].max() > WORDS - 20


def masked_by_transformers(tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands at the places that DataCollatorForLanguageModeling chose, and what stood there."""
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

    def ids(samples: Any, index: int, epoch: int) -> list[int]:
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
    """[CLS] first [SEP] second [SEP]; over 10,000 samples of documents of all lengths half of the seconds, in 3 sigma,
    have label 0: they go on in the same document. All others are of another document.
    """
    sizes = np.random.default_rng(1).integers(0, 400, 300).tolist()
    samples = documents_of([*sizes, 0, 1, 2, 3])
    marked = np.arange(10, 10 + len(samples.tokens))  # each token is its own, so that its place is known
    samples.tokens = marked.astype(np.uint32)
    unrelated, seen, full = [], set(), 0
    for number in range(10_000):
        epoch, index = divmod(number, len(samples))
        sample = samples.sample(index, epoch)
        size = int(sample["attention_mask"].sum())
        text, segments = original(sample)[:size], sample["token_type_ids"]
        ends = torch.nonzero(text == SEP).flatten().tolist()
        assert (int(text[0]), len(ends), ends[1]) == (CLS, 2, size - 1)
        assert segments.tolist() == [0] * (ends[0] + 1) + [1] * (size - 1 - ends[0]) + [0] * (64 - size)
        assert sample["input_ids"][size:].sum() == 0
        first, second = (words.numpy() - 10 for words in (text[1 : ends[0]], text[ends[0] + 1 : -1]))
        documents = [set(np.searchsorted(samples.ends, words, side="right")) for words in (first, second)]
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
    assert len(seen) > 0.98 * used
    assert samples.varies
    assert full > 7000
    assert not documents_of([61, 610]).varies


def test_pairs_need_two_documents() -> None:
    """Of one alone nothing is told apart; where nearly all is one, the other serves."""
    with pytest.raises(DataError, match=r"the corpus has 1 of two tokens or more; data.train.document says"):
        documents_of([500, 1, 0])
    samples = documents_of([100_000, 0, 5])
    assert {int(samples.sample(index, 0)["next_sentence_label"]) for index in range(50)} == {0, 1}


@pytest.mark.parametrize(("length", "most", "published"), [(128, 20, 19), (512, 80, 77), (64, 5, 5)])
def test_predictions_are_as_many_as_published(length: int, most: int, published: int) -> None:
    """min(max_predictions_per_seq, max(1, int(round(len(tokens) * masked_lm_prob)))), as in BERT's own script."""
    samples = MaskedBlocks(corpus(20_000), length, Masking(Words(), MaskedLm(max_predictions=most)), 0)
    assert {int((samples.sample(i, 0)["labels"] != IGNORED).sum()) for i in range(len(samples))} == {published}


def test_whole_words() -> None:
    """All pieces of a word are predicted or none, as many as without, or one less; fates are drawn piece by piece."""

    class Pieces(Words):
        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return [f"##{number}" if number % 3 == 0 else str(number) for number in ids]

    samples = MaskedBlocks(corpus(60_000), 64, Masking(Pieces(), MaskedLm(whole_words=True)), 0)
    counts, mixed = [], 0
    for index in range(300):
        sample = samples.sample(index, 0)
        text, chosen = original(sample), sample["labels"] != IGNORED
        for place in range(2, 63):
            if text[place] % 3 == 0:
                assert chosen[place] == chosen[place - 1]
                mixed += bool(chosen[place]) and (sample["input_ids"][place] == MASK) != (
                    sample["input_ids"][place - 1] == MASK
                )
        counts.append(int(chosen.sum()))
    assert max(counts) == 10
    assert np.mean(np.array(counts) == 10) > 0.95
    assert mixed > 20


def test_whole_words_need_marked_pieces() -> None:
    """A tokenizer of another kind is refused."""

    class Plain(Words):
        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return [str(number) for number in ids]

    with pytest.raises(DataError, match=r"data.masked_lm.whole_words: data.tokenizer marks no piece of a word by ##"):
        Masking(Plain(), MaskedLm(whole_words=True))


@pytest.mark.parametrize("missing", ["cls_token", "sep_token", "mask_token"])
def test_masking_needs_its_words(missing: str) -> None:
    """A tokenizer without [MASK], as GPT-2's, is refused by name."""
    words = Words()
    setattr(words, missing, None)
    with pytest.raises(DataError, match=f"data.tokenizer has no {missing}, .*train wordpiece"):
        Masking(words, MaskedLm())


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


def labelled(path: Path, lines: str, kind: Any = LabelledTexts, **columns: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.write_text(lines)
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")
    return kind(Corpus(format="jsonl", path=(str(path),), **columns), tokenizer, 4)


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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a", "label": "good"}', "x.jsonl:1: label is 'good'; sequence-regression takes a number"),
        ('{"text": "a", "label": 1}\n{"text": "a", "label": NaN}', "x.jsonl:2: label is nan; sequence-reg"),
        ('{"text": "a", "label": true}', "x.jsonl:1: label is True; sequence-regression takes a number"),
        ('{"text": "a"}', "x.jsonl:1: no column 'label'; it has text"),
    ],
)
def test_bad_numbers_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """What is no finite number is told by file and line."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines, ScoredTexts)


def test_numbers_are_float_labels(tmp_path: Path) -> None:
    """Whole numbers, too; there are no classes."""
    samples = labelled(tmp_path / "x.jsonl", '{"text": "a", "label": -1}\n{"text": "b", "label": 0.5}\n', ScoredTexts)
    found = torch.stack([samples.sample(index, 0)["labels"] for index in (0, 1)])
    assert (found.dtype, found.tolist(), samples.classes) == (torch.float32, [-1.0, 0.5], 0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a b", "label": [0, 1]}', "x.jsonl:1: text is 'a b'; token-classification takes a list, one a word"),
        ('{"text": ["a"], "label": 0}', "x.jsonl:1: label is 0; token-classification takes a list"),
        ('{"text": ["a", "b"], "label": [0]}', "x.jsonl:1: text has 2 words, and label 1 tags"),
        ('{"text": ["a", " "], "label": [0, 1]}', "x.jsonl:1: text has ' '; it must be a word"),
        ('{"text": ["a", "b"], "label": [0, "B"]}', "x.jsonl:1: label is 'B', and the first row's is 0; give words"),
        ('{"text": ["a"], "label": ["O"]}\n{"text": ["a"], "label": [-1]}', "x.jsonl:2: label is -1; a class is"),
    ],
)
def test_bad_tags_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """Lists that are none, of unequal length, and tags that are no classes are told by file and line."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines, TaggedWords)


def test_tags_are_on_first_pieces(tmp_path: Path) -> None:
    """Aligned as in transformers' run_ner example, whose rule is written out here; tags that are words are numbered."""
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {name: number for number, name in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "ab", "##c", "##d", "e"))}
    backend = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    row = {"text": ["abcd", "e", "abc-e", "e"], "label": ["B-X", "O", "I-X", "O"]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    samples = TaggedWords(Corpus(format="jsonl", path=(str(tmp_path / "x.jsonl"),)), tokenizer, 12)
    assert number_labels(samples, None) == ["B-X", "I-X", "O"]
    encoded = tokenizer(row["text"], is_split_into_words=True, truncation=True, padding="max_length", max_length=12)
    tags, before, expected = [0, 2, 1, 2], None, []
    for word in encoded.word_ids():  # run_ner.py: tokenize_and_align_labels, without label_all_tokens
        expected.append(IGNORED if word is None or word == before else tags[word])
        before = word
    sample = samples.sample(0, 0)
    assert sample["labels"].tolist() == expected == [-100, 0, -100, -100, 2, 1, *[-100] * 3, 2, -100, -100]
    assert sample["input_ids"].tolist() == encoded["input_ids"]


def test_no_rows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split without rows has no classes, and is said to be empty."""
    monkeypatch.setattr(labelled_module, "rows", lambda source: iter(()))
    with pytest.raises(DataError, match=": has no rows"):
        LabelledTexts(Corpus(format="hub", name="some/set"), Words(), 4)

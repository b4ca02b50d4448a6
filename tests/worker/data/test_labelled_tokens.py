"""Rows with labels in the cache give the same samples as direct calls of the tokenizer."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data import (
    IGNORED,
    LabelledTexts,
    Mixture,
    ScoredTexts,
    TaggedWords,
    label_rows,
    shards,
)
from ortlaunch.worker.data import token_cache as tokens
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.labelled_samples import renumber_labels_and_list_class_names

LENGTH = 12
# Empty, short and cut texts, letters beyond ASCII, a special token, and an unknown word.
TEXTS = [
    "",
    "the mat",
    "the cat sat on the mat",
    "Säße häufig,  nicht-oft",
    "unbelievable " * 9,
    " a\n[MASK] b",
    "x" * 50,
]
WORDS = [
    ["the", "cat-like", "äße"],
    ["unbelievable"] * 9,
    ["x"],
    ["a", "[MASK]", "supercalifragilistic"],
    ["on"] * 30,
]
KINDS = {
    LabelledTexts: (TEXTS, range(7)),
    ScoredTexts: (TEXTS, [0.1, -3, 1e300, 2**70, 5e-324, 0.0, 1 / 3]),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tokens' folder of a temporary cache; four rows make a chunk, saved after each."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "_DOCUMENTS_AT_ONCE", 4)
    monkeypatch.setattr(tokens, "_SAVE_SECONDS", 0.0)
    return tmp_path / "cache" / "tokens"


def wordpiece(side: str = "right", **options: Any) -> Any:
    """Return a tokenizer as BERT's, with [CLS] and [SEP]."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"".join(TEXTS)} - {" ", "\n"})
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "the", "cat", "un", "##able", *letters]
    names = {
        piece: number
        for number, piece in enumerate([*pieces, *(f"##{letter}" for letter in letters[:-9])])
    }
    backend = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        mask_token="[MASK]",
        padding_side=side,
        **options,
    )


def byte_level(side: str = "right") -> Any:
    """Return a tokenizer as GPT-2's, with a begin mark and without a token for padding."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>", padding_side=side)


def slow(side: str = "right") -> Any:
    """Return a tokenizer in Python, with </s> after each text."""
    from transformers import ByT5Tokenizer

    found = ByT5Tokenizer(padding_side=side)
    assert not found.is_fast
    return found


def corpus(path: Path, texts: Any, labels: Any) -> Corpus:
    rows = ({"text": text, "label": label} for text, label in zip(texts, labels))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus(format="jsonl", path=(str(path),))


def refuse(*arguments: Any, **options: Any) -> Any:
    pytest.fail("a row was read or tokenized once more")


def alike(found: Any, expected: dict[str, Any]) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [wordpiece, byte_level, slow])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_as_the_tokenizer_makes_them(
    kind: Any, make: Any, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples equal the tokenizer's output exactly, both new and from the cache."""
    texts, labels = KINDS[kind]
    source = corpus(tmp_path / "x.jsonl", texts, labels)
    tokenizer = make(side)
    plain = make(side)
    expected = []
    plain.pad_token = plain.pad_token or plain.eos_token
    for text, label in zip(texts, labels):
        found = plain(text, truncation=True, max_length=LENGTH, padding="max_length", return_token_type_ids=False,
                      return_tensors="pt")  # fmt: skip
        value = torch.tensor(float(label) if kind is ScoredTexts else label)
        expected.append({**{name: tensor[0] for name, tensor in found.items()}, "labels": value})
    assert {"input_ids", "attention_mask", "labels"} == expected[0].keys()
    for turn in range(2):
        samples = kind(source, tokenizer, LENGTH)
        for number, each in enumerate(expected):
            assert alike(samples.sample(number, 0), each), (turn, number)
            assert samples.size(number) == int(each["attention_mask"].sum())
        # The second turn must use the cache alone.
        monkeypatch.setattr(label_rows, "read_corpus_rows_up_to_limit", refuse)
        monkeypatch.setattr(type(tokenizer), "__call__", refuse)


@pytest.mark.parametrize("cut", ["right", "left"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [wordpiece, byte_level])
def test_words_are_as_the_tokenizer_makes_them(
    make: Any, side: str, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of each word has the word's tag, also if the word is cut."""
    labels = [[(number + len(words)) % 5 for number in range(len(words))] for words in WORDS]
    source = corpus(tmp_path / "x.jsonl", WORDS, labels)
    tokenizer = make(side)
    plain = make(side)
    tokenizer.truncation_side = plain.truncation_side = cut
    plain.pad_token = plain.pad_token or plain.eos_token
    expected = []
    for words, tags in zip(WORDS, labels):
        found = plain(words, is_split_into_words=True, truncation=True, max_length=LENGTH, padding="max_length",
                      return_token_type_ids=False)  # fmt: skip
        before = None
        of_pieces = []
        for word in found.word_ids():
            of_pieces.append(IGNORED if word is None or word == before else tags[word])
            before = word
        tensors = {name: torch.tensor(value) for name, value in found.items()}
        expected.append({**tensors, "labels": torch.tensor(of_pieces)})
    for _ in range(2):
        samples = TaggedWords(source, tokenizer, LENGTH)
        assert samples.classes == 5
        assert all(alike(samples.sample(number, 0), each) for number, each in enumerate(expected))
        assert [samples.size(n) for n in range(5)] == [
            int(each["attention_mask"].sum()) for each in expected
        ]
        # The second turn must use the cache alone.
        monkeypatch.setattr(label_rows, "read_corpus_rows_up_to_limit", refuse)
        monkeypatch.setattr(type(tokenizer), "__call__", refuse)


def test_a_tokenizer_without_masks(tmp_path: Path) -> None:
    """A tokenizer without masks makes samples without masks."""
    source = corpus(tmp_path / "x.jsonl", TEXTS, range(7))
    samples = LabelledTexts(source, wordpiece(model_input_names=["input_ids"]), LENGTH)
    assert list(samples.sample(2, 0)) == ["input_ids", "labels"]


def test_one_without_any_token_to_pad_with_is_told(tmp_path: Path) -> None:
    """A tokenizer without a token for padding or for the end of a text is refused."""
    tokenizer = wordpiece()
    tokenizer.pad_token = None
    with pytest.raises(
        DataError, match=r"data\.tokenizer: has neither a padding token nor an end-of-text token"
    ):
        LabelledTexts(corpus(tmp_path / "x.jsonl", TEXTS, range(7)), tokenizer, LENGTH)


@pytest.mark.parametrize("size", [7, 40])
def test_samples_that_lie_in_two_shards(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples and the summary of all rows may span two shards."""
    labels = [f"label {number}" for number in range(len(TEXTS))]
    source = corpus(tmp_path / "x.jsonl", TEXTS, labels)
    whole = LabelledTexts(source, wordpiece(), LENGTH)
    # `tokens` has imported the constant, so that both are set.
    monkeypatch.setattr(shards, "SHARD", size)
    monkeypatch.setattr(tokens, "SHARD", size)
    found = LabelledTexts(source, wordpiece(), LENGTH)
    assert renumber_labels_and_list_class_names(found, whole) == labels
    assert all(
        alike(found.sample(number, 0), dict(whole.sample(number, 0)))
        for number in range(len(TEXTS))
    )


def test_a_label_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest label has its location, also when it comes from the cache."""
    source = corpus(tmp_path / "x.jsonl", "abcd", [0, 999_999, 3, 999_999])
    for _ in range(2):
        samples = LabelledTexts(source, wordpiece(), LENGTH)
        assert samples.largest == (999_999, f"{tmp_path}/x.jsonl:2")
        assert samples.classes == 1_000_000
        monkeypatch.setattr(label_rows, "read_corpus_rows_up_to_limit", refuse)


def test_what_decides_on_tokens_and_labels(tmp_path: Path, cache: Path) -> None:
    """Length, side, column and tokenizer change the cache key; the last call does not."""
    path = tmp_path / "x.jsonl"
    source = corpus(path, TEXTS, range(7))
    rows = [
        json.loads(line) | {"other": number % 2}
        for number, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = wordpiece()
    LabelledTexts(source, tokenizer, LENGTH)
    # The tokenizer stays as it was saved.
    assert tokenizer.backend_tokenizer.truncation is tokenizer.backend_tokenizer.padding is None
    tokenizer("a", truncation=True, max_length=2, padding="max_length")
    LabelledTexts(source, tokenizer, LENGTH)
    assert len([*cache.glob("*.seal")]) == 1
    other = LabelledTexts(source.model_copy(update={"label_column": "other"}), tokenizer, LENGTH)
    assert [int(other.sample(number, 0)["labels"]) for number in range(3)] == [0, 1, 0]
    assert LabelledTexts(source, tokenizer, 8).sample(0, 0)["input_ids"].shape == (8,)
    LabelledTexts(source, wordpiece(truncation_side="left"), LENGTH)
    LabelledTexts(source, wordpiece(split_special_tokens=True), LENGTH)
    ScoredTexts(source, tokenizer, LENGTH)
    # The first one and five variants.
    assert len([*cache.glob("*.seal")]) == 6


def _killed_at(text: str, source: Corpus) -> None:
    from transformers import PreTrainedTokenizerFast

    call = PreTrainedTokenizerFast.__call__

    def deadly(self: Any, texts: list[str], **options: Any) -> Any:
        if text in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, texts, **options)

    PreTrainedTokenizerFast.__call__ = deadly  # type: ignore[method-assign]
    LabelledTexts(source, wordpiece(), LENGTH)


def test_a_killed_process_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL, the next process continues, with labels as from a single process."""
    from transformers import PreTrainedTokenizerFast

    texts = [f"text {number}" for number in range(40)]
    labels = [f"label {number % 7}" for number in range(40)]
    source = corpus(tmp_path / "x.jsonl", texts, labels)
    seen = list[str]()
    call = PreTrainedTokenizerFast.__call__
    killed = multiprocessing.get_context("fork").Process(
        target=_killed_at, args=("text 25", source)
    )
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, texts, **o: (seen.extend(texts), call(self, texts, **o))[1],
    )
    samples = LabelledTexts(source, wordpiece(), LENGTH)
    # Text 25 is in the seventh chunk of four; at most two earlier chunks were not saved yet.
    assert 16 <= len(seen) <= 24
    assert seen == texts[-len(seen) :]
    assert renumber_labels_and_list_class_names(samples, None) == sorted({*labels})
    assert [f"label {samples.sample(number, 0)['labels']}" for number in range(40)] == labels


def test_memory_does_not_grow_with_texts(tmp_path: Path) -> None:
    """The memory of samples does not depend on the number of rows."""
    tokenizer = wordpiece()

    def taken(count: int) -> int:
        texts = [f"the cat sat on mat {number} " * 20 for number in range(count)]
        source = corpus(tmp_path / f"{count}.jsonl", texts, [number % 3 for number in range(count)])
        del texts
        LabelledTexts(source, tokenizer, LENGTH)
        tracemalloc.start()
        samples = LabelledTexts(source, tokenizer, LENGTH)
        assert sum(len(samples.sample(number, 0)) for number in range(count)) == 3 * count
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found

    # The first call imports and caches things.
    taken(20)
    assert taken(3000) < taken(300) + 50_000


@pytest.mark.parametrize("count", [3, 9000])
def test_data_are_told_apart_as_before(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is of texts and class numbers of up to 8,191 rows, as in earlier versions."""
    # A run of an earlier version must be able to resume.
    monkeypatch.setattr(tokens, "_DOCUMENTS_AT_ONCE", 1000)
    texts = [f"text {number} äß " * (1 + number % 4) for number in range(count)]
    words = [text.split() for text in texts]
    tags = [[f"tag {len(word) % 2}" for word in row] for row in words]
    numbers = [[len(word) % 2 for word in row] for row in words]
    # Names (numbered by the alphabet: b is 1), integers, numbers of a regression, and tags.
    for kind, rows, labels, expected in (
        (
            LabelledTexts,
            texts,
            [["b", "a"][n % 2] for n in range(count)],
            [1 - n % 2 for n in range(count)],
        ),
        (LabelledTexts, texts, [*range(count)], [*range(count)]),
        (ScoredTexts, texts, [n / 3 for n in range(count)], [n / 3 for n in range(count)]),
        (TaggedWords, words, tags, numbers),
    ):
        samples: Any = kind(corpus(tmp_path / "x.jsonl", rows, labels), wordpiece(), LENGTH)
        renumber_labels_and_list_class_names(samples, None)
        pairs = [*zip(rows, expected)][:: max(1, count // 4096)]
        found = hashlib.blake2b(repr(pairs).encode(), digest_size=8).hexdigest()
        assert data_identity_record(samples)["fingerprint"] == found
        # A mixture has a fingerprint of its own.
        assert data_identity_record(Mixture([samples, samples], [1, 1]))["fingerprint"] not in (
            None,
            found,
        )
        with monkeypatch.context() as patch:
            patch.setattr(label_rows, "read_corpus_rows_up_to_limit", refuse)
            assert data_identity_record(samples)["fingerprint"] == found


def test_nothing_bad_is_kept(tmp_path: Path, cache: Path) -> None:
    """A bad row after many good ones is an error each time, and nothing of them is used."""
    source = corpus(tmp_path / "x.jsonl", ["a"] * 20, [0] * 19 + [-1])
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"x.jsonl:20: label is -1; a class is a name, or an integer from 0"
        ):
            LabelledTexts(source, wordpiece(), LENGTH)
    # Without a seal nothing in the cache is used; the corrected file is tokenized.
    assert not [*cache.glob("*.seal")]
    assert (
        len(LabelledTexts(corpus(tmp_path / "x.jsonl", ["a"] * 20, [0] * 20), wordpiece(), LENGTH))
        == 20
    )


def test_a_tokenizer_that_takes_no_lists_of_words(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that refuses lists of words, or is in Python alone, is an error."""
    source = corpus(tmp_path / "x.jsonl", [["a"]], [["O"]])
    tokenizer = byte_level()

    # The error of transformers 4 for a byte-level tokenizer without add_prefix_space.
    def call(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(
            "You need to instantiate GPT2TokenizerFast with add_prefix_space=True\nto use it"
        )

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=r"data\.tokenizer: does not accept lists of words: You need .* to use it",
        ):
            TaggedWords(source, tokenizer, LENGTH)
    with pytest.raises(
        DataError, match=r"data\.tokenizer: does not report the word of each token; use a fast"
    ):
        TaggedWords(source, slow(), LENGTH)
    assert not [*cache.glob("*.seal")]

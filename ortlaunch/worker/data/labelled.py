"""Samples of rows with labels: texts with a class or a number each, and words with a tag each."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ortlaunch.recipe.data import Corpus
from ortlaunch.worker.data.corpus import named, rows, value
from ortlaunch.worker.data.reading import DataError, Row
from ortlaunch.worker.data.samples import IGNORED, Samples

_AT_ONCE = 1000  # texts that are counted


class LabelledTexts:
    """Texts with a class each, cut or padded to one length."""

    task = "sequence-classification"
    options: Mapping[str, Any] = {}

    def __init__(self, source: str | Corpus, tokenizer: Any, length: int) -> None:
        assert isinstance(source, Corpus)
        self.texts: list[Any] = []
        self.labels: list[Any] = []  # words until `number_labels`
        self.largest = -1, ""  # label that is a number, and where it is
        self.names: list[tuple[str, ...]] = []  # of labels that are numbers; those of several files may differ
        for row in rows(source):
            text, label = self.read(row, source)
            self.texts.append(text)
            self.labels.append(label)
            greatest = max(label) if isinstance(label, list) else label
            if type(greatest) is int and greatest > self.largest[0]:
                self.largest = greatest, row.place
            names = row.names.get(source.label_column)
            if names and names not in self.names:
                self.names.append(names)
        if not self.texts:
            raise DataError(f"{named(source)}: has no rows")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer, self.length = tokenizer, length
        self._sizes: array[int] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, row: Row, source: Corpus) -> tuple[Any, Any]:
        """Text and label of a row."""
        label = value(row, source.label_column)
        return _text(row, source), _class(row, source.label_column, label, self._first())

    def _first(self) -> Any:
        """The label that all others are of one kind with."""
        return next(iter(self.all_labels()), None)

    def all_labels(self) -> Iterable[Any]:
        """Of all rows."""
        return self.labels

    def renumber(self, numbers: Mapping[str, int]) -> None:
        """Words become these numbers."""
        self.labels = [numbers[word] for word in self.labels]

    @property
    def classes(self) -> int:
        return int(max(self.all_labels())) + 1

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        encoded = self.encoded(self.texts[index], return_tensors="pt")
        return {**{name: value[0] for name, value in encoded.items()}, "labels": torch.tensor(self.labels[index])}

    def size(self, index: int) -> int:
        """Tokens of a sample before padding; those of all are counted at the first call."""
        if self._sizes is None:
            self._sizes = array("i")
            for first in range(0, len(self.texts), _AT_ONCE):
                masks = self.encoded(self.texts[first : first + _AT_ONCE], **self.options)["attention_mask"]
                self._sizes.extend(map(sum, masks))
        return self._sizes[index]

    def encoded(self, text: Any, **options: Any) -> Any:
        """At full length, as the tokenizer has it."""
        return self.tokenizer(
            text, truncation=True, max_length=self.length, padding="max_length",
            return_token_type_ids=False,  # one segment: zeros for those models that have them, an error for the others
            **options,
        )  # fmt: skip


class ScoredTexts(LabelledTexts):
    """Texts with a number each, for regression."""

    task = "sequence-regression"
    classes = 0

    def read(self, row: Row, source: Corpus) -> tuple[Any, Any]:
        label = value(row, source.label_column)
        # A bool is an int, and no number.
        if type(label) not in (int, float) or not math.isfinite(label):
            raise DataError(f"{row.place}: {source.label_column} is {label!r:.80}; sequence-regression takes a number")
        return _text(row, source), float(label)


class TaggedWords(LabelledTexts):
    """Lists of words with a tag each; a word's first piece has its tag, what is left of it none."""

    task = "token-classification"
    options = {"is_split_into_words": True}
    varies = True

    def __init__(self, source: str | Corpus, tokenizer: Any, length: int) -> None:
        super().__init__(source, tokenizer, length)
        if not tokenizer.is_fast:
            raise DataError("data.tokenizer: does not tell which word a piece is of, as fast tokenizers do")
        try:
            self.encoded(self.texts[0], **self.options)
        except (AssertionError, ValueError) as error:  # as of byte-level ones without add_prefix_space
            raise DataError(f"data.tokenizer: takes no lists of words: {' '.join(str(error).split())}") from None

    def read(self, row: Row, source: Corpus) -> tuple[Any, Any]:
        words, tags = value(row, source.text_column), value(row, source.label_column)
        for name, found in ((source.text_column, words), (source.label_column, tags)):
            if not isinstance(found, list) or not found:
                raise DataError(f"{row.place}: {name} is {found!r:.80}; token-classification takes a list, one a word")
        if len(words) != len(tags):
            raise DataError(
                f"{row.place}: {source.text_column} has {len(words)} words, and {source.label_column} {len(tags)} tags"
            )
        wrong = next((word for word in words if not isinstance(word, str) or not word.strip()), None)
        if wrong is not None:
            raise DataError(f"{row.place}: {source.text_column} has {wrong!r:.80}; it must be a word")
        first = self._first()
        return words, [_class(row, source.label_column, tag, tags[0] if first is None else first) for tag in tags]

    def all_labels(self) -> Iterable[Any]:
        return itertools.chain.from_iterable(self.labels)

    def renumber(self, numbers: Mapping[str, int]) -> None:
        self.labels = [[numbers[word] for word in row] for row in self.labels]

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        encoded, tags = self.encoded(self.texts[index], **self.options), self.labels[index]
        words = encoded.word_ids()
        begins = (word is not None and word != before for before, word in zip([None, *words], words))
        labels = [tags[word] if first else IGNORED for first, word in zip(begins, words)]
        return {**{name: torch.tensor(value) for name, value in encoded.items()}, "labels": torch.tensor(labels)}


OF_ROWS = {kind.task: kind for kind in (LabelledTexts, ScoredTexts, TaggedWords)}


def number_labels(
    train: Samples, evaluation: Samples | None, known: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Labels that are words become numbers; the words by number, [] where they are numbers.

    known: numbers that the model has for labels already, which are taken if it has all; else the alphabet's order is.

    Raises:
        DataError: some sources have words and others numbers, all words are one, or one of the evaluation is in no
            training row.
    """
    parts, held_out = _labelled(train), _labelled(evaluation)
    if not _are_words(*parts, *held_out):
        return []
    words = sorted({word for part in parts for word in part.all_labels()})
    if known and {word for part in (*parts, *held_out) for word in part.all_labels()} <= known.keys():
        for part in (*parts, *held_out):
            part.renumber(known)
        return sorted(known, key=known.__getitem__)
    if len(words) == 1:
        raise DataError(f"data.train: every label is {words[0]!r}, and there is nothing to tell apart")
    unknown = sorted({word for part in held_out for word in part.all_labels()} - set(words))
    if unknown:
        raise DataError(f"data.evaluation: label {unknown[0]!r} is in no row of data.train, which has {len(words)}")
    numbers = {word: number for number, word in enumerate(words)}
    for part in (*parts, *held_out):
        part.renumber(numbers)
    return words


def number_as_trained(samples: Samples, known: Mapping[str, int]) -> None:
    """Give labels that are words the numbers that a trained model knows, of which these samples may have some alone.

    Raises:
        DataError: the model has no such label, or sources do not go together.
    """
    parts = _labelled(samples)
    if not _are_words(*parts):
        return
    unknown = sorted({word for part in parts for word in part.all_labels()} - known.keys())
    if unknown:
        raise DataError(
            f"data: label {unknown[0]!r} is none of the model's: {', '.join(known) or 'it has numbers alone'}"
        )
    for part in parts:
        part.renumber(known)


def _labelled(samples: Samples | None) -> list[LabelledTexts]:
    """Those of a mixture, or these alone."""
    return [part for part in getattr(samples, "parts", [samples]) if isinstance(part, LabelledTexts)]


def _are_words(*parts: LabelledTexts) -> bool:
    """Whether labels are words, in all."""
    kinds = {type(next(iter(part.all_labels()))) for part in parts}
    if len(kinds) > 1:
        raise DataError("data: labels are words in one source and numbers in another; give words alone, or numbers")
    return kinds == {str}


def class_names(train: Samples, evaluation: Samples | None) -> list[str]:
    """Of labels that are numbers, in their order, where the data set has them.

    Raises:
        DataError: two sources have other names for the same numbers.
    """
    parts = [part for part in (*_labelled(train), *_labelled(evaluation)) if not isinstance(part, ScoredTexts)]
    found = list(dict.fromkeys(names for part in parts for names in part.names))
    if len(found) > 1:
        one, other = (", ".join(names) for names in found[:2])
        raise DataError(
            f"data: the numbers of labels stand for {one} in one source and {other} in another; give names as labels"
        )
    return list(found[0]) if found else []


def _class(row: Row, column: str, label: Any, first: Any) -> int | str:
    """A label, if it is one, and of one kind with the first."""
    # A bool is an int, and no class.
    if label == "" or type(label) not in (int, str) or (isinstance(label, int) and label < 0):
        raise DataError(f"{row.place}: {column} is {label!r:.80}; a class is a word, or an integer from 0")
    if first is not None and type(label) is not type(first):
        raise DataError(
            f"{row.place}: {column} is {label!r}, and the first row's is {first!r}; give words alone, or numbers alone"
        )
    found: int | str = label
    return found


def _text(row: Row, source: Corpus) -> str:
    text = value(row, source.text_column)
    if not isinstance(text, str):
        raise DataError(f"{row.place}: {source.text_column} is {text!r:.80}; it must be text")
    return text

"""Samples of rows with labels: texts with a class or a number each, and words with a tag each.

They are tokenized once into the cache, as texts are. A row is one document there: its tokens, cut
to the length of a sample, followed by its labels as integers. The last document is the summary of
all rows.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.cache import add_cache_note
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.corpus import fingerprint
from ortlaunch.worker.data.label_rows import (
    LabelledRow,
    SourceSummary,
    classified,
    labelled_rows,
    scored,
    tagged,
)
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED, Sample, Samples
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    Work,
    plain_backend,
    silent,
    stored,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes named in one line for the user.
_SHOWN = 6
# A whole number, as a class name; and the names that transformers gives to classes without names.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DEFAULT_NAME = re.compile(r"LABEL_[0-9]+")
# Rows that identify a data set; up to twice as many are used.
_SOME = 4096
_Ints = NDArray[np.uint32]


class LabelledTexts:
    """Samples of texts with a class each, cut or padded to one length."""

    task = "sequence-classification"
    read: ClassVar[staticmethod[..., tuple[Any, list[Any]]]] = staticmethod(classified)
    behind = 1
    """Count of integers after the tokens of a row."""

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = silent,
    ) -> None:
        assert isinstance(source, Corpus)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise DataError("data.tokenizer: has neither a padding token nor an end-of-text token")
        self.source = source
        self.length = length
        self._show_progress = show_progress
        self._pad = tokenizer.pad_token_id
        self._on_the_left = tokenizer.padding_side == "left"
        self._with_mask = "attention_mask" in tokenizer.model_input_names
        # The 2 is the version of this format.
        self._key = f"{self.task} 2 {fingerprint(source)} {source.label_column}"
        key = f"{self._key} {length} {_decides(tokenizer)}"
        self._documents = stored(Work(key, self._items, self._encoder(tokenizer)), show_progress)
        of_all = json.loads(_text_of(self._documents, len(self)))
        # Each label once; labels that are names stay so until `number_labels`.
        self.labels: list[Any] = of_all["labels"]
        # Rows, or words, of each label.
        self.counts: list[int] = of_all["counts"]
        # The largest integer label, and its location.
        self.largest: tuple[int, str] = tuple(of_all["largest"])
        # Class names of integer labels.
        self.names = [tuple(names) for names in of_all["names"]]

    def __len__(self) -> int:
        # The last document is the summary.
        return len(self._documents.ends) - 1

    def _items(self) -> Iterator[tuple[LabelledRow | str, float]]:
        """Yield the rows, and at the end the summary of all rows as JSON."""
        found = SourceSummary()
        for row in labelled_rows(self.source, self.read, found):
            yield row, row.share
        yield json.dumps({**vars(found), "labels": [*found.labels]}), 1.0

    def _encoder(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[list[Any]], Iterator[Sequence[int]]]:
        """Return the function that makes documents of rows."""
        # A call with truncation changes a fast tokenizer's saved settings, so that a copy is used.
        own = functools.cache(lambda: copy.deepcopy(tokenizer) if tokenizer.is_fast else tokenizer)

        def encode(items: list[Any]) -> Iterator[Sequence[int]]:
            rows = [item for item in items if isinstance(item, LabelledRow)]
            if rows:
                yield from self._encoded(own(), rows)
            # The summary comes after all rows; one token for each of its bytes.
            yield from (item.encode() for item in items[len(rows) :])

        return encode

    def _encoded(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        found = self._called(tokenizer, rows)["input_ids"]
        return ([*ids, *row.numbers] for ids, row in zip(found, rows))

    def _called(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow], **options: Any
    ) -> Any:
        """Return the tokenizer's output for texts, cut but not padded."""
        # A text is one segment: token types would be zeros, and some models do not accept them.
        return tokenizer(
            [row.text for row in rows], truncation=True, max_length=self.length,
            return_token_type_ids=False,
            return_attention_mask=False,
            **options,
        )  # fmt: skip

    def all_labels(self) -> Iterable[Any]:
        """Return each label that a row has, once."""
        return self.labels

    def renumber(self, numbers: Mapping[Any, int]) -> None:
        """Replace labels by these class numbers."""
        self.labels = [numbers[label] for label in self.labels]

    @property
    def classes(self) -> int:
        """Number of classes, from the largest label."""
        return int(max(self.labels)) + 1

    def sample(self, index: int, epoch: int) -> Sample:
        document = _document(self._documents, index)
        size = self.size(index)
        ids = document[:size]
        behind = document[size:]
        found = {"input_ids": self._padded(ids, self._pad)}
        if self._with_mask:
            found["attention_mask"] = self._padded(np.ones_like(ids), 0)
        return {**found, "labels": self._labels_of(behind)}

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample before padding."""
        first, after = _place(self._documents, index)
        return after - first - self.behind

    def _labels_of(self, behind: _Ints) -> torch.Tensor:
        """Return the labels as the model expects them, from a row's stored integers."""
        return torch.tensor(self._label(behind.tolist()))

    def _label(self, numbers: list[int]) -> Any:
        """Return the label of a row, with names as class numbers."""
        return self.labels[numbers[0]]

    def _padded(self, values: _Ints, fill: int) -> torch.Tensor:
        """Return values padded to (length,), on the tokenizer's padding side."""
        found: _Ints = np.full(self.length, fill, np.int64)
        count = len(values)
        found[slice(self.length - count, None) if self._on_the_left else slice(count)] = values
        return torch.from_numpy(found)

    def some(self) -> list[tuple[Any, Any]]:
        """Return some texts, evenly spread, with their labels.

        The first call reads the rows once more; later calls read the cache.
        """
        step = max(1, len(self) // _SOME)

        def items() -> Iterator[tuple[str, float]]:
            chosen = itertools.islice(
                labelled_rows(self.source, self.read, SourceSummary()), 0, None, step
            )
            return ((json.dumps([row.text, row.numbers]), row.share) for row in chosen)

        found = stored(
            Work(f"some {step} {self._key}", items, lambda texts: map(str.encode, texts)),
            self._show_progress,
        )
        pairs = (json.loads(_text_of(found, number)) for number in range(len(found.ends)))
        return [(text, self._label(numbers)) for text, numbers in pairs]


class ScoredTexts(LabelledTexts):
    """Samples of texts with a number each, for regression."""

    task = "sequence-regression"
    read = staticmethod(scored)
    behind = 2
    classes = 0

    def _label(self, numbers: list[int]) -> Any:
        # Two uint32 are the halves of a float64; see `SourceSummary.number`.
        return np.array(numbers, np.uint32).view(np.float64).item()


class TaggedWords(LabelledTexts):
    """Samples of word lists with a tag for each word.

    The first token of a word has the word's tag; the other tokens have no label.
    """

    task = "token-classification"
    read = staticmethod(tagged)
    varies = True

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = silent,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "data.tokenizer: does not report the word of each token; use a fast tokenizer"
            )
        super().__init__(source, tokenizer, length, show_progress)

    def _encoded(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        """Yield token ids, followed by an integer for each of them.

        The integer is 1 + the index of the tag for the first token of a word, and 0 for others.
        """
        try:
            found = self._called(tokenizer, rows, is_split_into_words=True)
        # For example byte-level tokenizers without add_prefix_space.
        except (AssertionError, ValueError) as error:
            raise DataError(
                f"data.tokenizer: does not accept lists of words: {' '.join(str(error).split())}"
            ) from None
        for number, row in enumerate(rows):
            words = found.word_ids(number)
            begins = (
                word is not None and word != before for before, word in zip([None, *words], words)
            )
            tags = (row.numbers[word] + 1 if first else 0 for first, word in zip(begins, words))
            yield [*found["input_ids"][number], *tags]

    def size(self, index: int) -> int:
        first, after = _place(self._documents, index)
        return (after - first) // 2

    def _labels_of(self, behind: _Ints) -> torch.Tensor:
        tags = [self.labels[number - 1] if number else IGNORED for number in behind.tolist()]
        return self._padded(np.array(tags, np.int64), IGNORED)

    def _label(self, numbers: list[int]) -> Any:
        return [self.labels[number] for number in numbers]


def _decides(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that determines the tokens of a text, except the length it is cut to."""
    if tokenizer.is_fast:
        # The tokenizer's own state also has the truncation and padding of its last call.
        known = plain_backend(tokenizer).to_str()
    else:
        given = json.dumps(
            tokenizer.init_kwargs, sort_keys=True, default=lambda each: type(each).__name__
        )
        known = (
            f"{given} {tokenizer.special_tokens_map} {tokenizer.added_tokens_decoder} "
            f"{vocabulary_of(tokenizer)}"
        )
    special = getattr(tokenizer, "split_special_tokens", False)
    return f"{type(tokenizer).__name__} {tokenizer.truncation_side} {special} {known}"


def _place(documents: Documents, index: int) -> tuple[int, int]:
    """Return the range [first, after) of a document's tokens."""
    return int(documents.ends[index - 1]) if index else 0, int(documents.ends[index])


def _document(documents: Documents, index: int) -> _Ints:
    return documents.tokens[slice(*_place(documents, index))]


def _text_of(documents: Documents, index: int) -> bytes:
    """Return a document that is JSON, stored as one byte in each token."""
    return _document(documents, index).astype(np.uint8).tobytes()


OF_ROWS = {"class": LabelledTexts, "number": ScoredTexts, "word": TaggedWords}


def number_labels(
    train: Samples, evaluation: Samples | None, known: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Replace label names by class numbers in all samples.

    Args:
        train: training samples.
        evaluation: evaluation samples.
        known: class numbers that the model has for label names already. They are used if they
            include all labels; otherwise labels are numbered by their value if all are whole
            numbers, else in alphabetical order.

    Returns:
        The label names by class number; [] if labels are integers.

    Raises:
        DataError: some sources have names and others integers, there is a single name, or a name of
            the evaluation samples is in no training row.
    """
    parts = _labelled(train)
    # A part of the training samples is numbered with them.
    held_out = [part for part in _labelled(evaluation) if part not in parts]
    are_words = _are_words(*parts, *held_out)
    word_of = _word_of_each_label([*parts, *held_out], [])
    # Integers that a data set gives names are class numbers.
    are_names = are_words or not class_names(train, evaluation)
    if word_of and are_names and known.keys() >= {*word_of.values()}:
        for part in (*parts, *held_out):
            part.renumber({label: known[word] for label, word in word_of.items()})
        return sorted(known, key=known.__getitem__)
    if not are_words:
        return []
    words = sorted({word for part in parts for word in part.all_labels()})
    if all(map(_WHOLE.fullmatch, words)):
        words.sort(key=int)
    if len(words) == 1:
        raise DataError(
            f"data.train: every label is {words[0]!r}, so there is nothing to distinguish"
        )
    unknown = sorted({word for part in held_out for word in part.all_labels()} - set(words))
    if unknown:
        raise DataError(
            f"data.evaluation: label {unknown[0]!r} is in no row of data.train, "
            f"whose labels are {', '.join(words[:_SHOWN])}{_more(len(words))}"
        )
    numbers = {word: number for number, word in enumerate(words)}
    for part in (*parts, *held_out):
        part.renumber(numbers)
    return words


def number_as_trained(samples: Samples, known: Mapping[str, int], classes: int) -> None:
    """Replace labels by the class numbers of a trained model; some classes may not appear.

    A label is the name of a class, as a word or as a whole number. Whole numbers none of which is
    a name are class numbers.

    Args:
        samples: the samples.
        known: class name to class number; empty if classes have no names.
        classes: number of classes; 0: unknown.

    Raises:
        DataError: the model has no such class.
    """
    parts = _labelled(samples)
    names = class_names(samples, None)
    word_of = _word_of_each_label(parts, names)
    numbers = {label: known[word] for label, word in word_of.items() if word in known}
    are_named = not all(map(_DEFAULT_NAME.fullmatch, known))
    are_numbers = not (names or any(isinstance(label, str) for label in word_of))
    if not numbers and (
        are_numbers if are_named else all(_WHOLE.fullmatch(str(label)) for label in word_of)
    ):
        numbers = {label: int(label) for label in word_of if not classes or int(label) < classes}
        if are_named and numbers:
            add_cache_note(f"data: labels are whole numbers and no class names; they are read as class numbers: "
                 f"0 is {min(known, key=known.__getitem__)!r}")  # fmt: skip
    if unknown := [label for label in word_of if label not in numbers]:
        locations = dict(part.largest for part in parts)
        label = max(unknown, key=lambda each: each in locations)
        limit = f" from 0 to {classes - 1:,}" if classes else ""
        shown = ", ".join(known) if are_named else f"it has only numbers{limit}"
        where = locations.get(label, "data")
        raise DataError(f"{where}: label {label!r} is none of the model's: {shown}")
    for part in parts:
        part.renumber(numbers)


def _word_of_each_label(parts: Sequence[LabelledTexts], names: Sequence[str]) -> dict[Any, str]:
    """Return the word of each label; names: class names of integer labels, or []."""
    labels = {label: None for part in parts for label in part.all_labels()}
    words = dict(enumerate(names))
    return {label: words.get(label, str(label)) for label in labels}


def _labelled(samples: Samples | None) -> list[LabelledTexts]:
    """Return the samples with labels: the parts of a mixture, or the samples themselves."""
    parts = [getattr(part, "whole", part) for part in getattr(samples, "parts", [samples])]
    return [part for part in parts if isinstance(part, LabelledTexts)]


def _are_words(*parts: LabelledTexts) -> bool:
    """Return whether all labels are names; raises DataError where sources differ."""
    kinds = {type(label) for part in parts for label in part.all_labels()}
    if len(kinds) > 1:
        raise DataError(
            "data: labels are names in one source and numbers in another; use only names, or "
            "only numbers"
        )
    return kinds == {str}


def class_lines(train: Samples, names: Sequence[str], classes: int) -> Iterator[str]:
    """Yield lines for the user: the classes, and those with too few training rows to learn.

    Args:
        train: training samples; without classes nothing is yielded.
        names: class names by number; [] if classes have no names.
        classes: number of classes of the model.
    """
    parts = [part for part in _labelled(train) if not isinstance(part, ScoredTexts)]
    if not parts:
        return
    counts = Counter[Any]()
    for part in parts:
        counts.update(dict(zip(part.labels, part.counts)))
    unit = "word" if isinstance(parts[0], TaggedWords) else "row"
    total = max(classes, len(names))
    yield f"classes: {total:,}" + (
        f" ({', '.join(names[:_SHOWN])}{_more(len(names))})" if names else ""
    )
    absent = (number for number in range(total) if number not in counts)
    single = [number for number, count in counts.items() if count == 1]
    for found, size, words in (
        (
            list(itertools.islice(absent, _SHOWN)),
            total - len(counts),
            f"no training {unit} has class",
        ),
        (sorted(single)[:_SHOWN], len(single), f"a single training {unit} has class"),
    ):
        if found:
            shown = ", ".join(names[number] if names else str(number) for number in found)
            yield f"classes: {words} {shown}{_more(size)}; check data.train's labels"


def _more(size: int) -> str:
    return f" and {size - _SHOWN:,} more" if size > _SHOWN else ""


def class_names(train: Samples, evaluation: Samples | None) -> list[str]:
    """Return the class names of integer labels by number; [] if the data set has no names.

    Raises:
        DataError: two sources have different names for the same numbers.
    """
    parts = [
        part
        for part in (*_labelled(train), *_labelled(evaluation))
        if not isinstance(part, ScoredTexts)
    ]
    found = list(dict.fromkeys(names for part in parts for names in part.names))
    if len(found) > 1:
        one, other = (", ".join(names) for names in found[:2])
        raise DataError(
            f"data: the numbers of labels mean {one} in one source and {other} in another; use "
            "names as labels"
        )
    return list(found[0]) if found else []

"""Samples of rows with labels: texts with a class or a number each, and words with a tag each.

They are tokenized once into the cache as texts are. A row is a document there: its tokens, cut to the length of a
sample, and behind them its labels in numbers. The last document is what all rows have together.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

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
from ortlaunch.worker.data.tokens import (
    Documents,
    Tell,
    Work,
    plain_backend,
    silent,
    stored,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 6  # classes in a line
_SOME = 4096  # rows that tell one data set from another: so many, or up to twice as many
_Ints = NDArray[np.uint32]


class LabelledTexts:
    """Texts with a class each, cut or padded to one length."""

    task = "sequence-classification"
    read: ClassVar[staticmethod[..., tuple[Any, list[Any]]]] = staticmethod(classified)
    behind = 1
    """Numbers behind the tokens of a row."""

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        tell: Tell = silent,
    ) -> None:
        assert isinstance(source, Corpus)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise DataError(
                "data.tokenizer: has neither a token for padding nor one for the end of a text"
            )
        self.source = source
        self.length = length
        self._tell = tell
        self._pad = tokenizer.pad_token_id
        self._on_the_left = tokenizer.padding_side == "left"
        self._with_mask = "attention_mask" in tokenizer.model_input_names
        self._key = f"{self.task} 2 {fingerprint(source)} {source.label_column}"
        key = f"{self._key} {length} {_decides(tokenizer)}"
        self._documents = stored(Work(key, self._items, self._encoder(tokenizer)), tell)
        of_all = json.loads(_text_of(self._documents, len(self)))
        self.labels: list[Any] = of_all["labels"]  # each once; words until `number_labels`
        self.counts: list[int] = of_all["counts"]  # of rows, or words, by label
        self.largest: tuple[int, str] = tuple(
            of_all["largest"]
        )  # label that is a number, and where it is
        self.names = [tuple(names) for names in of_all["names"]]  # of labels that are numbers

    def __len__(self) -> int:
        return len(self._documents.ends) - 1

    def _items(self) -> Iterator[tuple[LabelledRow | str, float]]:
        """Rows, and at last what all of them have."""
        found = SourceSummary()
        for row in labelled_rows(self.source, self.read, found):
            yield row, row.share
        yield json.dumps({**vars(found), "labels": [*found.labels]}), 1.0

    def _encoder(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[list[Any]], Iterator[Sequence[int]]]:
        """Rows -> documents; by a copy, for a call changes what a fast tokenizer is saved with."""
        own = functools.cache(lambda: copy.deepcopy(tokenizer) if tokenizer.is_fast else tokenizer)

        def encode(items: list[Any]) -> Iterator[Sequence[int]]:
            rows = [item for item in items if isinstance(item, LabelledRow)]
            if rows:
                yield from self._encoded(own(), rows)
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
        """As the tokenizer has texts that are cut, before they are padded."""
        return tokenizer(
            [row.text for row in rows], truncation=True, max_length=self.length,
            return_token_type_ids=False,  # one segment: zeros for those models that have them, an error for the others
            return_attention_mask=False,
            **options,
        )  # fmt: skip

    def all_labels(self) -> Iterable[Any]:
        """Each that a row has, once."""
        return self.labels

    def renumber(self, numbers: Mapping[str, int]) -> None:
        """Words become these numbers."""
        self.labels = [numbers[word] for word in self.labels]

    @property
    def classes(self) -> int:
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
        """Tokens of a sample before padding."""
        first, after = _place(self._documents, index)
        return after - first - self.behind

    def _labels_of(self, behind: _Ints) -> torch.Tensor:
        """As the model takes them."""
        return torch.tensor(self._label(behind.tolist()))

    def _label(self, numbers: list[int]) -> Any:
        """As the row has it, its words in numbers."""
        return self.labels[numbers[0]]

    def _padded(self, values: _Ints, fill: int) -> torch.Tensor:
        """To (length,), on the tokenizer's side."""
        found: _Ints = np.full(self.length, fill, np.int64)
        count = len(values)
        found[slice(self.length - count, None) if self._on_the_left else slice(count)] = values
        return torch.from_numpy(found)

    def some(self) -> list[tuple[Any, Any]]:
        """Some texts, evenly spread, with their labels; rows are read once more for them, and later the cache."""
        step = max(1, len(self) // _SOME)

        def items() -> Iterator[tuple[str, float]]:
            chosen = itertools.islice(
                labelled_rows(self.source, self.read, SourceSummary()), 0, None, step
            )
            return ((json.dumps([row.text, row.numbers]), row.share) for row in chosen)

        found = stored(
            Work(f"some {step} {self._key}", items, lambda texts: map(str.encode, texts)),
            self._tell,
        )
        pairs = (json.loads(_text_of(found, number)) for number in range(len(found.ends)))
        return [(text, self._label(numbers)) for text, numbers in pairs]


class ScoredTexts(LabelledTexts):
    """Texts with a number each, for regression."""

    task = "sequence-regression"
    read = staticmethod(scored)
    behind = 2
    classes = 0

    def _label(self, numbers: list[int]) -> Any:
        return np.array(numbers, np.uint32).view(np.float64).item()


class TaggedWords(LabelledTexts):
    """Lists of words with a tag each; a word's first piece has its tag, what is left of it none."""

    task = "token-classification"
    read = staticmethod(tagged)
    varies = True

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        tell: Tell = silent,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "data.tokenizer: does not tell which word a piece is of, as fast tokenizers do"
            )
        super().__init__(source, tokenizer, length, tell)

    def _encoded(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        """Behind the tokens a number for each: 0, or of a word's first piece one more than its tag's."""
        try:
            found = self._called(tokenizer, rows, is_split_into_words=True)
        except (
            AssertionError,
            ValueError,
        ) as error:  # as of byte-level ones without add_prefix_space
            raise DataError(
                f"data.tokenizer: takes no lists of words: {' '.join(str(error).split())}"
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
    """All that decides on the tokens of a text but where it is cut."""
    if tokenizer.is_fast:
        known = plain_backend(tokenizer).to_str()  # of its own say where it last cut and padded
    else:
        given = json.dumps(
            tokenizer.init_kwargs, sort_keys=True, default=lambda each: type(each).__name__
        )
        known = f"{given} {tokenizer.special_tokens_map} {tokenizer.added_tokens_decoder} {vocabulary_of(tokenizer)}"
    special = getattr(tokenizer, "split_special_tokens", False)
    return f"{type(tokenizer).__name__} {tokenizer.truncation_side} {special} {known}"


def _place(documents: Documents, index: int) -> tuple[int, int]:
    """First token of a document, and after its last."""
    return int(documents.ends[index - 1]) if index else 0, int(documents.ends[index])


def _document(documents: Documents, index: int) -> _Ints:
    return documents.tokens[slice(*_place(documents, index))]


def _text_of(documents: Documents, index: int) -> bytes:
    """A document that is JSON, a byte a token."""
    return _document(documents, index).astype(np.uint8).tobytes()


OF_ROWS = {"class": LabelledTexts, "number": ScoredTexts, "word": TaggedWords}


def number_labels(
    train: Samples, evaluation: Samples | None, known: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Labels that are words become numbers; the words by number, [] where they are numbers.

    known: numbers that the model has for labels already, which are taken if it has all; else the alphabet's order is.

    Raises:
        DataError: some sources have words and others numbers, all words are one, or one of the evaluation is in no
            training row.
    """
    parts = _labelled(train)
    held_out = _labelled(evaluation)
    if not _are_words(*parts, *held_out):
        return []
    words = sorted({word for part in parts for word in part.all_labels()})
    if (
        known
        and {word for part in (*parts, *held_out) for word in part.all_labels()} <= known.keys()
    ):
        for part in (*parts, *held_out):
            part.renumber(known)
        return sorted(known, key=known.__getitem__)
    if len(words) == 1:
        raise DataError(
            f"data.train: every label is {words[0]!r}, and there is nothing to tell apart"
        )
    unknown = sorted({word for part in held_out for word in part.all_labels()} - set(words))
    if unknown:
        raise DataError(
            f"data.evaluation: label {unknown[0]!r} is in no row of data.train, which has {len(words)}"
        )
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
    return [
        part for part in getattr(samples, "parts", [samples]) if isinstance(part, LabelledTexts)
    ]


def _are_words(*parts: LabelledTexts) -> bool:
    """Whether labels are words, in all."""
    kinds = {type(label) for part in parts for label in part.all_labels()}
    if len(kinds) > 1:
        raise DataError(
            "data: labels are words in one source and numbers in another; give words alone, or numbers"
        )
    return kinds == {str}


def class_lines(train: Samples, names: Sequence[str], classes: int) -> Iterator[str]:
    """The classes for a person, and which of them can hardly be learned; nothing where there are none.

    Args:
        names: of the classes, by number; [] where they have none.
        classes: how many the model tells apart.
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
    """Of labels that are numbers, in their order, where the data set has them.

    Raises:
        DataError: two sources have other names for the same numbers.
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
            f"data: the numbers of labels stand for {one} in one source and {other} in another; give names as labels"
        )
    return list(found[0]) if found else []

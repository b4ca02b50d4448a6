"""Rows with labels as files have them: a text with a class or a number, or words with a tag each.

What is none is told by its place. Labels are numbered as they appear, so that what is kept of a row is numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.rules.model_rules import MOST_CLASSES
from ortlaunch.worker.data.corpus import named, rows, value
from ortlaunch.worker.data.reading import DataError, Row

Read = Callable[[Row, Corpus, Any], tuple[Any, list[Any]]]
"""(row, source, first label of all or None) -> text or words, and the label or a label for each word."""


@dataclass(frozen=True)
class LabelledRow:
    """A row, its labels in numbers."""

    text: str | list[str]
    numbers: list[int]
    """Of each label its place among those that the source has; of a number as label, the two halves of its float64."""
    share: float
    """How much of the source is read with it."""

    def __len__(self) -> int:
        """Letters."""
        return len(self.text) if isinstance(self.text, str) else sum(map(len, self.text))


@dataclass
class SourceSummary:
    """What all rows of a source together have, when the last one is read."""

    labels: dict[Any, int] = field(default_factory=dict)
    """Words, or numbers of classes, by their first appearance."""
    counts: list[int] = field(default_factory=list)
    """Of each label in `labels`: how many rows, or words, have it."""
    largest: tuple[int, str] = (-1, "")
    """Label that is a number, and where it is."""
    names: list[tuple[str, ...]] = field(default_factory=list)
    """Of labels that are numbers; those of several files may differ."""

    def number(self, label: Any, place: str) -> list[int]:
        """What is kept of a label.

        Raises:
            DataError: it is beyond the most classes.
        """
        if isinstance(label, float):
            return [*map(int, np.array([label]).view(np.uint32))]
        if isinstance(label, int) and label > self.largest[0]:
            self.largest = label, place
            require_class(label, place)
        number = self.labels.setdefault(label, len(self.labels))
        if number == len(self.counts):
            self.counts.append(0)
        self.counts[number] += 1
        return [number]


def require_class(label: int, place: str) -> None:
    """A model's head has as many rows as the largest label says: an id, or a hash, is none.

    Raises:
        DataError: it is beyond the most classes.
    """
    if label >= MOST_CLASSES:
        raise DataError(
            f"{place}: label {label} is too large: classes are integers from 0 to {MOST_CLASSES - 1:,}, and a model "
            "has as many as the largest says; give words as labels, or consecutive numbers (is this a column of ids?)"
        )


def labelled_rows(source: Corpus, read: Read, found: SourceSummary) -> Iterator[LabelledRow]:
    """Rows in a fixed order; `found` has all of them when they are at their end.

    Raises:
        DataError: there are none, or one is not what `read` takes; with file and line.
    """
    row = None
    for row in rows(source):
        text, labels = read(row, source, next(iter(found.labels), None))
        names = row.names.get(source.label_column)
        if names and names not in found.names:
            found.names.append(names)
        yield LabelledRow(
            text, [part for label in labels for part in found.number(label, row.place)], row.share
        )
    if row is None:
        raise DataError(f"{named(source)}: has no rows")


def classified(row: Row, source: Corpus, first: Any) -> tuple[str, list[Any]]:
    """A text with its class."""
    label = value(row, source.label_column)
    return _text(row, source), [_class(row, source.label_column, label, first)]


def scored(row: Row, source: Corpus, first: Any) -> tuple[str, list[Any]]:
    """A text with its number, for regression."""
    label = value(row, source.label_column)
    # A bool is an int, and no number.
    if type(label) not in (int, float) or not math.isfinite(label):
        raise DataError(
            f"{row.place}: {source.label_column} is {label!r:.80}; sequence-regression takes a number"
        )
    return _text(row, source), [float(label)]


def tagged(row: Row, source: Corpus, first: Any) -> tuple[list[str], list[Any]]:
    """Words with a tag each."""
    words = value(row, source.text_column)
    tags = value(row, source.label_column)
    for name, found in ((source.text_column, words), (source.label_column, tags)):
        if not isinstance(found, list) or not found:
            raise DataError(
                f"{row.place}: {name} is {found!r:.80}; token-classification takes a list, one a word"
            )
    if len(words) != len(tags):
        raise DataError(
            f"{row.place}: {source.text_column} has {len(words)} words, and {source.label_column} {len(tags)} tags"
        )
    wrong = next((word for word in words if not isinstance(word, str) or not word.strip()), None)
    if wrong is not None:
        raise DataError(f"{row.place}: {source.text_column} has {wrong!r:.80}; it must be a word")
    return words, [
        _class(row, source.label_column, tag, tags[0] if first is None else first) for tag in tags
    ]


def _class(row: Row, column: str, label: Any, first: Any) -> int | str:
    """A label, if it is one, and of one kind with the first."""
    # A bool is an int, and no class.
    if label == "" or type(label) not in (int, str) or (isinstance(label, int) and label < 0):
        raise DataError(
            f"{row.place}: {column} is {label!r:.80}; a class is a word, or an integer from 0"
        )
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

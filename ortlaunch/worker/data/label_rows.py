"""Rows with labels as files store them: a text with a class or a number, or words with a tag each.

An error names the location of an invalid row. Labels are numbered in the order in which they
appear, so that a stored row consists of integers alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.rules.model_rules import MOST_CLASSES
from ortlaunch.worker.data.corpus import corpus_name, rows, value
from ortlaunch.worker.data.reading import DataError, Row

# A number in a cell of CSV.
_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
Read = Callable[[Row, Corpus, Any], tuple[Any, list[Any]]]
"""(row, source, first label of the source or None) -> text or words, and a list of labels.

The list has one label, or one for each word.
"""


@dataclass(frozen=True)
class LabelledRow:
    """A row with its labels as integers."""

    text: str | list[str]
    numbers: list[int]
    """Index of each label among the source's labels; for regression, two halves of a float64."""
    share: float
    """Share (0 to 1) of the source that has been read after this row."""

    def __len__(self) -> int:
        """Return the number of characters."""
        return len(self.text) if isinstance(self.text, str) else sum(map(len, self.text))


@dataclass
class SourceSummary:
    """A summary of all rows of a source; complete after the last row."""

    labels: dict[Any, int] = field(default_factory=dict)
    """Labels (names or integers) to their indices, in the order of their first appearance."""
    counts: list[int] = field(default_factory=list)
    """Number of rows, or words, with each label of `labels`."""
    largest: tuple[int, str] = (-1, "")
    """The largest integer label, and its location."""
    names: list[tuple[str, ...]] = field(default_factory=list)
    """Class names of integer labels; the names of several files may differ."""

    def encode(self, label: Any, place: str) -> list[int]:
        """Return the stored form of a label, and count the label.

        Raises:
            DataError: the label exceeds the largest allowed class.
        """
        # Rows are stored as uint32, which has a float64 in two halves.
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
    """Refuse a label that is too large for a class.

    Raises:
        DataError: the label exceeds the largest allowed class.
    """
    # The model's head has as many rows as the largest label requires: a column of ids or hashes
    # would make it huge.
    if label >= MOST_CLASSES:
        raise DataError(
            f"{place}: label {label} is too large: classes are integers from 0 to "
            f"{MOST_CLASSES - 1:,}, and the largest label sets the number of classes; use names "
            "or consecutive numbers as labels (is this a column of ids?)"
        )


def labelled_rows(source: Corpus, read: Read, found: SourceSummary) -> Iterator[LabelledRow]:
    """Yield rows in a fixed order, and collect their summary.

    Args:
        source: the corpus.
        read: the reader for the task: `classified`, `scored` or `tagged`.
        found: the summary to fill; it is complete after the last row.

    Raises:
        DataError: there are no rows, or `read` refuses one; the message gives file and line.
    """
    row = None
    for row in rows(source):
        text, labels = read(row, source, next(iter(found.labels), None))
        names = row.names.get(source.label_column)
        if names and names not in found.names:
            found.names.append(names)
        yield LabelledRow(
            text, [part for label in labels for part in found.encode(label, row.place)], row.share
        )
    if row is None:
        raise DataError(f"{corpus_name(source)}: has no rows")


def classified(row: Row, source: Corpus, first: Any) -> tuple[str, list[Any]]:
    """Return a text and its class."""
    label = value(row, source.label_column)
    return text_of(row, source), [class_of(row, source.label_column, label, first)]


def scored(row: Row, source: Corpus, first: Any) -> tuple[str, list[Any]]:
    """Return a text and its number, for regression."""
    label = value(row, source.label_column)
    if source.format == "csv" and _NUMBER.fullmatch(label):
        label = float(label)
    # The type is compared, as isinstance accepts a bool as an int.
    if type(label) not in (int, float) or not math.isfinite(label):
        raise DataError(
            f"{row.place}: {source.label_column} is {label!r:.80}; sequence-regression needs a "
            "number"
        )
    return text_of(row, source), [float(label)]


def tagged(row: Row, source: Corpus, first: Any) -> tuple[list[str], list[Any]]:
    """Return words and the tag of each word."""
    words = value(row, source.text_column)
    tags = value(row, source.label_column)
    for name, found in ((source.text_column, words), (source.label_column, tags)):
        if not isinstance(found, list) or not found:
            raise DataError(
                f"{row.place}: {name} is {found!r:.80}; token-classification needs a list with "
                "one label per word"
            )
    if len(words) != len(tags):
        raise DataError(
            f"{row.place}: {source.text_column} has {len(words)} words, "
            f"and {source.label_column} {len(tags)} tags"
        )
    # A tokenizer may make no token of a blank word, and its tag would be lost.
    wrong = next((word for word in words if not isinstance(word, str) or not word.strip()), None)
    if wrong is not None:
        raise DataError(f"{row.place}: {source.text_column} has {wrong!r:.80}; it must be a word")
    return words, [
        class_of(row, source.label_column, tag, tags[0] if first is None else first) for tag in tags
    ]


def class_of(row: Row, column: str, label: Any, first: Any) -> int | str:
    """Return a label after checks; it must have the type of the source's first label."""
    # The type is compared, as isinstance accepts a bool as an int.
    if label == "" or type(label) not in (int, str) or (isinstance(label, int) and label < 0):
        raise DataError(
            f"{row.place}: {column} is {label!r:.80}; a class is a name, or an integer from 0"
        )
    if first is not None and type(label) is not type(first):
        raise DataError(
            f"{row.place}: {column} is {label!r}, and the first row's is {first!r}; use only "
            "names, or only numbers"
        )
    found: int | str = label
    return found


def text_of(row: Row, source: Corpus) -> str:
    """Return the text of a row; raises DataError where it is none."""
    text = value(row, source.text_column)
    if not isinstance(text, str):
        raise DataError(f"{row.place}: {source.text_column} is {text!r:.80}; it must be text")
    return text

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
from ortlaunch.recipe.rules.model_rules import MAX_CLASSES
from ortlaunch.worker.data.corpus import (
    corpus_name_for_errors,
    read_corpus_rows_up_to_limit,
    require_column_value_of_allowed_length,
)
from ortlaunch.worker.data.file_rows import DataError, Row

# A number in a cell of CSV.
_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
ReadLabelledRow = Callable[[Row, Any, Any], tuple[Any, list[Any]]]
"""(row, source, first label of the source or None) -> text or words, and a list of labels.

The list has one label, or one for each word.
"""


class TextPosition(int):
    """A label that is the index of a character, and no class."""


@dataclass(frozen=True)
class LabelledRow:
    """A row with its labels as integers."""

    text: str | list[str]
    label_integers: list[int]
    """Index of each label among the source's labels; for regression, two halves of a float64."""
    share: float
    """Share (0 to 1) of the source that has been read after this row."""
    location: str = ""
    """Location for errors."""

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
    empty: tuple[int, str] = (0, "")
    """Number of rows without text, and the location of the first."""

    def encode_label_and_count_class(self, label_or_target: Any, row_location: str) -> list[int]:
        """Return the stored form of a label, and count the label.

        Raises:
            DataError: the label exceeds the largest allowed class.
        """
        # Rows are stored as uint32, which has a float64 in two halves.
        if isinstance(label_or_target, TextPosition):
            return [label_or_target]
        if isinstance(label_or_target, float):
            return [*map(int, np.array([label_or_target]).view(np.uint32))]
        if isinstance(label_or_target, int) and label_or_target > self.largest[0]:
            self.largest = label_or_target, row_location
            refuse_too_large_class(label_or_target, row_location)
        label_index = self.labels.setdefault(label_or_target, len(self.labels))
        if label_index == len(self.counts):
            self.counts.append(0)
        self.counts[label_index] += 1
        return [label_index]


def refuse_too_large_class(label: int, row_location: str) -> None:
    """Refuse a label that is too large for a class.

    Raises:
        DataError: the label exceeds the largest allowed class.
    """
    # The model's head has as many rows as the largest label requires: a column of ids or hashes
    # would make it huge.
    if label >= MAX_CLASSES:
        raise DataError(
            f"{row_location}: label {label} is too large: classes are integers from 0 to "
            f"{MAX_CLASSES - 1:,}, and the largest label sets the number of classes; use names "
            "or consecutive numbers as labels (is this a column of ids?)"
        )


def labelled_rows_filling_summary(
    source: str | Corpus, read_row: ReadLabelledRow, summary: SourceSummary
) -> Iterator[LabelledRow]:
    """Yield rows in a fixed order, and collect their summary.

    Args:
        source: the corpus.
        read_row: the reader for the task: `classified`, `scored` or `tagged`.
        summary: the summary to fill; it is complete after the last row.

    Raises:
        DataError: there are no rows, or `read_row` refuses one; the message gives file and line.
    """
    row = None
    for row in read_corpus_rows_up_to_limit(source):
        text, labels = read_row(row, source, next(iter(summary.labels), None))
        names = row.names.get(getattr(source, "label_column", ""))
        if names and names not in summary.names:
            summary.names.append(names)
        if not (text.strip() if isinstance(text, str) else text):
            summary.empty = summary.empty[0] + 1, summary.empty[1] or row.location
        yield LabelledRow(
            text,
            [
                part
                for label in labels
                for part in summary.encode_label_and_count_class(label, row.location)
            ],
            row.share,
            row.location,
        )
    if row is None:
        raise DataError(f"{corpus_name_for_errors(source)}: has no rows")


def text_and_class_of_row(row: Row, source: Corpus, first_label: Any) -> tuple[str, list[Any]]:
    """Return a text and its class."""
    label = require_column_value_of_allowed_length(row, source.label_column)
    return require_row_text(row, source), [
        require_class_label_of_same_type(row, source.label_column, label, first_label)
    ]


def require_text_and_class_list_of_row(
    row: Row, source: Corpus, first_label: Any
) -> tuple[str, list[Any]]:
    """Return a text and its classes, of which there may be none."""
    labels = require_column_value_of_allowed_length(row, source.label_column)
    if not isinstance(labels, list):
        raise DataError(
            f"{row.location}: {source.label_column} is {labels!r:.80}; multi-label-classification "
            "needs a list of classes, which may be empty"
        )
    checked_labels = [
        require_class_label_of_same_type(
            row, source.label_column, label, labels[0] if first_label is None else first_label
        )
        for label in labels
    ]
    repeated = [label for label in checked_labels if checked_labels.count(label) > 1]
    if repeated:
        raise DataError(
            f"{row.location}: {source.label_column} has {repeated[0]!r} twice; a class belongs to "
            "a text or does not"
        )
    return require_row_text(row, source), checked_labels


def require_text_and_finite_number_of_row(
    row: Row, source: Corpus, first_label: Any
) -> tuple[str, list[Any]]:
    """Return a text and its number, for regression."""
    label = require_column_value_of_allowed_length(row, source.label_column)
    if source.format == "csv" and _NUMBER.fullmatch(label):
        label = float(label)
    # The type is compared, as isinstance accepts a bool as an int.
    if type(label) not in (int, float) or not math.isfinite(label):
        raise DataError(
            f"{row.location}: {source.label_column} is {label!r:.80}; sequence-regression needs a "
            "number"
        )
    return require_row_text(row, source), [float(label)]


def require_words_and_tags_of_row(
    row: Row, source: Corpus, first_label: Any
) -> tuple[list[str], list[Any]]:
    """Return words and the tag of each word."""
    word_list = require_column_value_of_allowed_length(row, source.text_column)
    tags = require_column_value_of_allowed_length(row, source.label_column)
    for name, values in ((source.text_column, word_list), (source.label_column, tags)):
        if not isinstance(values, list) or not values:
            raise DataError(
                f"{row.location}: {name} is {values!r:.80}; token-classification needs a list with "
                "one label per word"
            )
    if len(word_list) != len(tags):
        raise DataError(
            f"{row.location}: {source.text_column} has {len(word_list)} words, "
            f"and {source.label_column} {len(tags)} tags"
        )
    # A tokenizer may make no token of a blank word, and its tag would be lost.
    invalid_word = next(
        (word for word in word_list if not isinstance(word, str) or not word.strip()), None
    )
    if invalid_word is not None:
        raise DataError(
            f"{row.location}: {source.text_column} has {invalid_word!r:.80}; it must be a word"
        )
    return word_list, [
        require_class_label_of_same_type(
            row, source.label_column, tag, tags[0] if first_label is None else first_label
        )
        for tag in tags
    ]


def require_class_label_of_same_type(
    row: Row, column: str, label: Any, first_label: Any
) -> int | str:
    """Return a label after checks; it must have the type of the source's first label."""
    # The type is compared, as isinstance accepts a bool as an int.
    if label == "" or type(label) not in (int, str) or (isinstance(label, int) and label < 0):
        raise DataError(
            f"{row.location}: {column} is {label!r:.80}; a class is a name, or an integer from 0"
        )
    if first_label is not None and type(label) is not type(first_label):
        raise DataError(
            f"{row.location}: {column} is {label!r}, and the first row's is {first_label!r}; use only "
            "names, or only numbers"
        )
    checked_label: int | str = label
    return checked_label


def require_row_text(row: Row, source: Corpus) -> str:
    """Return the text of a row; raises DataError where it is none."""
    text = require_column_value_of_allowed_length(row, source.text_column)
    if not isinstance(text, str):
        raise DataError(f"{row.location}: {source.text_column} is {text!r:.80}; it must be text")
    return text

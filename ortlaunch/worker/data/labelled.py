"""Samples that are texts with a class each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.recipe.data import Corpus
from ortlaunch.worker.data.corpus import rows, value
from ortlaunch.worker.data.reading import DataError, Row
from ortlaunch.worker.data.samples import Samples


class LabelledTexts:
    """Texts with a class each, cut or padded to one length."""

    def __init__(self, source: str | Corpus, tokenizer: Any, length: int) -> None:
        assert isinstance(source, Corpus)
        self.texts: list[str] = []
        self.labels: list[Any] = []  # words until `number_labels`
        for row in rows(source):
            text, label = _labelled(row, source)
            if self.labels and type(label) is not type(self.labels[0]):
                raise DataError(
                    f"{row.place}: {source.label_column} is {label!r}, and the first row's is {self.labels[0]!r}; give "
                    "words alone, or numbers alone"
                )
            self.texts.append(text)
            self.labels.append(label)
        if not self.texts:
            raise DataError("data: the corpus for sequence-classification has no rows")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer, self.length = tokenizer, length

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> int:
        return int(max(self.labels)) + 1

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        encoded = self.tokenizer(
            self.texts[index], truncation=True, max_length=self.length, padding="max_length", return_tensors="pt",
            return_token_type_ids=False,  # one segment: zeros for those models that have them, an error for the others
        )  # fmt: skip
        return {**{name: value[0] for name, value in encoded.items()}, "labels": torch.tensor(self.labels[index])}


def number_labels(train: Samples, evaluation: Samples | None) -> list[str]:
    """Labels that are words become numbers, in the order of the alphabet; the words, [] where they are numbers.

    Raises:
        DataError: some sources have words and others numbers, all words are one, or one of the evaluation is in no
            training row.
    """
    parts = [part for part in getattr(train, "parts", [train]) if isinstance(part, LabelledTexts)]
    held_out = [evaluation] if isinstance(evaluation, LabelledTexts) else []
    kinds = {type(part.labels[0]) for part in (*parts, *held_out)}
    if len(kinds) > 1:
        raise DataError("data: labels are words in one source and numbers in another; give words alone, or numbers")
    if kinds != {str}:
        return []
    words = sorted({word for part in parts for word in part.labels})
    if len(words) == 1:
        raise DataError(f"data.train: every label is {words[0]!r}, and there is nothing to tell apart")
    unknown = sorted({word for part in held_out for word in part.labels} - set(words))
    if unknown:
        raise DataError(f"data.evaluation: label {unknown[0]!r} is in no row of data.train, which has {len(words)}")
    numbers = {word: number for number, word in enumerate(words)}
    for part in (*parts, *held_out):
        part.labels = [numbers[word] for word in part.labels]
    return words


def _labelled(row: Row, source: Corpus) -> tuple[str, int | str]:
    """Text and class of a row."""
    text, label = value(row, source.text_column), value(row, source.label_column)
    # A bool is an int, and no class.
    if label == "" or type(label) not in (int, str) or (isinstance(label, int) and label < 0):
        raise DataError(f"{row.place}: {source.label_column} is {label!r}; a class is a word, or an integer from 0")
    if not isinstance(text, str):
        raise DataError(f"{row.place}: {source.text_column} is {text!r:.80}; it must be text")
    return text, label

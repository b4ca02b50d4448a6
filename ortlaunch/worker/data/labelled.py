"""Samples that are texts with a class each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.recipe.data import Corpus
from ortlaunch.worker.data.corpus import rows, value
from ortlaunch.worker.data.reading import DataError, Row


class LabelledTexts:
    """Texts with a class each, cut or padded to one length."""

    def __init__(self, source: str | Corpus, tokenizer: Any, length: int) -> None:
        assert isinstance(source, Corpus)
        self.texts: list[str] = []
        self.labels: list[int] = []
        for row in rows(source):
            text, label = _labelled(row, source)
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
        return max(self.labels) + 1

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        encoded = self.tokenizer(
            self.texts[index], truncation=True, max_length=self.length, padding="max_length", return_tensors="pt",
            return_token_type_ids=False,  # one segment: zeros for those models that have them, an error for the others
        )  # fmt: skip
        return {**{name: value[0] for name, value in encoded.items()}, "labels": torch.tensor(self.labels[index])}


def _labelled(row: Row, source: Corpus) -> tuple[str, int]:
    """Text and class of a row."""
    text, label = value(row, source.text_column), value(row, source.label_column)
    if type(label) is not int or label < 0:  # a bool is an int, and no class
        raise DataError(f"{row.place}: {source.label_column} is {label!r}; a class is an integer from 0")
    if not isinstance(text, str):
        raise DataError(f"{row.place}: {source.text_column} is {text!r:.80}; it must be text")
    return text, label

"""Samples of a context with several choices, of which one is right, as SWAG has them.

A row is one document of the cache: for each choice its token ids and their types, then the lengths
of the choices, the index of the right one, and the number of choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.corpus import (
    read_corpus_rows_up_to_limit,
    require_column_value_of_allowed_length,
)
from ortlaunch.worker.data.file_rows import DataError, Row
from ortlaunch.worker.data.label_rows import LabelledRow, TextPosition
from ortlaunch.worker.data.labelled_samples import LabelledTexts, document_tokens
from ortlaunch.worker.data.samples import Sample
from ortlaunch.worker.data.token_cache import ShowProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChoiceTexts(LabelledTexts):
    """Samples of a context with each of its choices: tensors of (choices, length)."""

    task = "multiple-choice"
    columns = ("context_column", "choice_columns", "label_column")

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = ignore_progress,
    ) -> None:
        self._pad_type = tokenizer.pad_token_type_id
        self._with_types = "token_type_ids" in tokenizer.model_input_names
        super().__init__(source, tokenizer, length, show_progress)
        row_indices = range(len(self._documents.ends) - 1)
        counts = [int(document_tokens(self._documents, index)[-1]) for index in row_indices]
        if bad_index := next((i for i, count in enumerate(counts) if count != counts[0]), 0):
            rows = read_corpus_rows_up_to_limit(source)
            raise DataError(
                f"{[*rows][bad_index].location}: has {counts[bad_index]} choices, and the first row "
                f"{counts[0]}; all rows need equally many"
            )

    @staticmethod
    def read(row: Row, source: Corpus, first_label: Any) -> tuple[list[str], list[Any]]:
        """Return the context and the choices, and the index of the right one."""
        columns = (source.context_column, *source.choice_columns)
        texts: list[Any] = [require_column_value_of_allowed_length(row, name) for name in columns]
        # A single column may hold a list.
        texts = [texts[0], *texts[1]] if isinstance(texts[1], list) else texts
        invalid_texts = [text for text in texts if not isinstance(text, str) or not text]
        if invalid_texts or not texts[2:]:
            raise DataError(
                f"{row.location}: {', '.join(columns)} have {len(texts) - 1} choices"
                + (f", and {invalid_texts[0]!r:.80} among the texts" if invalid_texts else "")
                + "; multiple-choice needs a text, and two or more choices"
            )
        label = require_column_value_of_allowed_length(row, source.label_column)
        # A cell of CSV is text.
        label = int(label) if source.format == "csv" and label.isdecimal() else label
        if type(label) is not int or not 0 <= label < len(texts) - 1:
            raise DataError(
                f"{row.location}: {source.label_column} is {label!r:.80}; it must be the index of "
                f"the right choice, from 0 to {len(texts) - 2}"
            )
        return texts, [TextPosition(label)]

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        for row in rows:
            context, choices = row.text[0], [*row.text[1:]]
            encoding = tokenizer(
                [context] * len(choices), choices, truncation=True, max_length=self.length,
                return_token_type_ids=True,
            )  # fmt: skip
            ids: list[list[int]] = encoding["input_ids"]
            pairs = zip(ids, encoding["token_type_ids"])
            integers = [integer for pair in pairs for part in pair for integer in part]
            yield [*integers, *map(len, ids), *row.label_integers, len(ids)]

    def size(self, index: int) -> int:
        """Return the tokens of the longest choice."""
        return max(self._sizes_and_label(index)[:-1])

    def _sizes_and_label(self, index: int) -> list[int]:
        document = document_tokens(self._documents, index)
        numbers: list[int] = document[-2 - int(document[-1]) : -1].tolist()
        return numbers

    def sample(self, index: int, epoch: int) -> Sample:
        document = document_tokens(self._documents, index)
        *sizes, label = self._sizes_and_label(index)
        ends = np.cumsum([size for size in sizes for _ in range(2)])
        parts = np.split(document, ends)[:-1]
        pad = self._pad_on_tokenizer_side
        tensors = {"input_ids": torch.stack([pad(ids, self._pad) for ids in parts[::2]])}
        if self._with_types:
            types = [pad(segments, self._pad_type) for segments in parts[1::2]]
            tensors["token_type_ids"] = torch.stack(types)
        if self._with_mask:
            masks = [pad(np.ones_like(ids), 0) for ids in parts[::2]]
            tensors["attention_mask"] = torch.stack(masks)
        return {**tensors, "labels": torch.tensor(label)}

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return stored_numbers

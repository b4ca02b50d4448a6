"""Samples of several texts each: a query and documents, for tasks embedding and reranker.

They are tokenized once into the cache, as texts with labels are. A row is one document there: the
tokens of its sequences one after the other, the length of each, the row's numbers as halves of
float64, a hash of the query, and the counts of sequences and numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.compared_texts import Embedding
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.tables.text_losses import TextLoss
from ortlaunch.worker.data.corpus import require_column_value_of_allowed_length
from ortlaunch.worker.data.file_rows import DataError, Row
from ortlaunch.worker.data.label_rows import LabelledRow
from ortlaunch.worker.data.labelled_samples import ScoredTexts, document_tokens
from ortlaunch.worker.data.samples import Sample
from ortlaunch.worker.data.token_cache import ShowProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUILT_IN_COLUMNS = ("query", "positive", "negative")
# The bit of a stored token that is of the second segment of a pair.
_SECOND_SEGMENT = 31
# The hash of the query, and the counts of sequences and of numbers.
_STORED_LAST = 4


class ComparedTexts(ScoredTexts):
    """Samples of a query and its documents.

    `input_ids` and `attention_mask` are (sequences, length). A sequence is a text for task embedding,
    and the query with a document for reranker. `text_ids` (sequences,) is equal for equal tokens;
    `query_id` is of the query alone. `labels` are the row's numbers, if the loss has any.
    """

    def __init__(
        self,
        source: str | Corpus,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        show_progress: ShowProgress = ignore_progress,
    ) -> None:
        settings = recipe.model.text_comparison
        assert settings is not None
        self._columns = source.text_columns if isinstance(source, Corpus) else _BUILT_IN_COLUMNS
        self._loss = settings.traits
        self._loss_name = settings.loss
        self._is_joint = recipe.model.traits.compares == "reranker"
        self._prompts = (
            [settings.query_prompt or "", settings.document_prompt or ""]
            if isinstance(settings, Embedding)
            else ["", ""]
        )
        self._has_segments = self._is_joint and "token_type_ids" in tokenizer.model_input_names
        self._text_count = 0
        # The whole row of the loss, because rows in the cache are not checked again.
        self.task = f"{recipe.model.task} {self._columns} {self._prompts} {self._loss}"
        self.read = self._texts_and_numbers_of_row
        super().__init__(source, tokenizer, recipe.data.sequence_length or 0, show_progress)

    def _texts_and_numbers_of_row(
        self, row: Row, source: str | Corpus, first_label: Any
    ) -> tuple[list[str], list[float]]:
        """Return the texts and the numbers of a row.

        Raises:
            DataError: a text is missing or empty, there are too many or too few of them, or the row's
                numbers do not suit the loss.
        """
        texts = []
        for column in self._columns:
            value = require_column_value_of_allowed_length(row, column)
            for text in value if isinstance(value, list) else [value]:
                if not isinstance(text, str) or not text.strip():
                    raise DataError(
                        f"{row.location}: {column} is {value!r:.80}; it must be text, not empty; leave "
                        "the row out, or correct it"
                    )
                texts.append(text)
        self._text_count = self._text_count or len(texts)
        if len(texts) != self._text_count:
            raise DataError(
                f"{row.location}: has {len(texts)} texts, and the first row {self._text_count}; give "
                "each row of a source as many"
            )
        documents = len(texts) - 1
        limits = self._loss.least_documents, self._loss.most_documents
        if not limits[0] <= documents <= limits[1]:
            accepted_count_text = limits[0] if limits[0] == limits[1] else f"at least {limits[0]}"
            raise DataError(
                f"{row.location}: has {documents} texts after the first; loss {self._loss_name} takes "
                f"{accepted_count_text} (text_columns: {', '.join(self._columns)})"
            )
        label_column = source.label_column if isinstance(source, Corpus) else "label"
        return texts, _numbers_of_row(row, label_column, documents, self._loss)

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        query_prompt, document_prompt = self._prompts
        for row in rows:
            query, *documents = list(row.text)
            if self._is_joint:
                encoding = tokenizer(
                    [query] * len(documents),
                    documents,
                    truncation=True,
                    max_length=self.length,
                    return_attention_mask=False,
                    return_token_type_ids=self._has_segments,
                )
                segments = encoding.get("token_type_ids")
            else:
                texts = [query_prompt + query, *(document_prompt + text for text in documents)]
                encoding = tokenizer(
                    texts,
                    truncation=True,
                    max_length=self.length,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                )
                segments = None
            sequences = encoding["input_ids"]
            if segments is not None:
                sequences = [
                    [token | segment << _SECOND_SEGMENT for token, segment in zip(*pair)]
                    for pair in zip(sequences, segments)
                ]
            query_hash = hashlib.blake2b(query.encode(), digest_size=8).digest()
            yield [
                *(token for sequence in sequences for token in sequence),
                *map(len, sequences),
                *row.label_integers,
                *np.frombuffer(query_hash, np.uint32).tolist(),
                len(sequences),
                len(row.label_integers) // 2,
            ]

    def sample(self, index: int, epoch: int) -> Sample:
        stored = document_tokens(self._documents, index)
        sequence_count, number_count = stored[-2:].tolist()
        numbers_begin = len(stored) - _STORED_LAST - 2 * number_count
        lengths = stored[numbers_begin - sequence_count : numbers_begin].tolist()
        ends = np.cumsum(lengths).tolist()
        sequences = [stored[end - length : end] for end, length in zip(ends, lengths)]
        segments = [sequence >> _SECOND_SEGMENT for sequence in sequences]
        sequences = [sequence & (2**_SECOND_SEGMENT - 1) for sequence in sequences]
        tensors = {
            "input_ids": self._pad_all(sequences, self._pad),
            "attention_mask": self._pad_all([np.ones_like(ids) for ids in sequences], 0),
            "text_ids": torch.tensor([_hash_of_tokens(ids.tobytes()) for ids in sequences]),
            "query_id": torch.from_numpy(stored[-_STORED_LAST:-2].copy().view(np.int64))[0],
        }
        if self._has_segments:
            tensors["token_type_ids"] = self._pad_all(segments, 0)
        if number_count:
            numbers = stored[numbers_begin : numbers_begin + 2 * number_count].copy()
            values = torch.from_numpy(numbers.view(np.float64)).float()
            tensors["labels"] = values[0] if self._loss.label == "score" else values
        return tensors

    def _pad_all(self, sequences: list[Any], fill_value: int) -> torch.Tensor:
        return torch.stack([self._pad_on_tokenizer_side(ids, fill_value) for ids in sequences])

    def size(self, index: int) -> int:
        stored = document_tokens(self._documents, index)
        sequence_count, number_count = stored[-2:].tolist()
        numbers_begin = len(stored) - _STORED_LAST - 2 * number_count
        return int(stored[numbers_begin - sequence_count : numbers_begin].max())

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return np.array(stored_numbers, np.uint32).view(np.float64).tolist()


def _hash_of_tokens(token_bytes: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(token_bytes, digest_size=8).digest(), "big", signed=True)


def _numbers_of_row(
    row: Row, label_column: str, document_count: int, loss: TextLoss
) -> list[float]:
    """Return the numbers that a loss needs of a row.

    Raises:
        DataError: they are missing, too few or too many, no numbers, or out of range.
    """
    if not loss.label:
        return []
    if loss.label == "relevance" and label_column not in row.values:
        if document_count == 1:
            raise DataError(
                f"{row.location}: no column {label_column!r}, and one document: all pairs would be right; "
                "give label_column, or columns of wrong documents in text_columns"
            )
        return [1.0, *[0.0] * (document_count - 1)]
    value = require_column_value_of_allowed_length(row, label_column)
    numbers = value if isinstance(value, list) else [value]
    try:
        # A cell of CSV is text.
        numbers = [float("nan") if isinstance(item, bool) else float(item) for item in numbers]
    except (TypeError, ValueError):
        numbers = [math.nan]
    least, most = loss.label_limits
    range_text = f" from {least} to {most}" if math.isfinite(least) else ""
    if not all(math.isfinite(value) and least <= value <= most for value in numbers):
        raise DataError(
            f"{row.location}: {label_column} is {value!r:.80}; it must be a number{range_text}, or a "
            "list of them"
        )
    needed_count = {"score": 1, "margins": document_count - 1, "relevance": document_count}[
        loss.label
    ]
    if loss.label == "margins" and len(numbers) == document_count:
        return [numbers[0] - score for score in numbers[1:]]
    if len(numbers) != needed_count:
        raise DataError(
            f"{row.location}: {label_column} has {len(numbers)} numbers; with {document_count} documents "
            f"it must have {needed_count}"
        )
    return numbers

"""Samples of two texts: one that an encoder reads, and one that a decoder learns to write.

A row is one document of the cache: the tokens of both, and the number of those to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.corpus import require_column_value_of_allowed_length
from ortlaunch.worker.data.file_rows import DataError, Row
from ortlaunch.worker.data.label_rows import LabelledRow
from ortlaunch.worker.data.labelled_samples import LabelledTexts, document_tokens
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.token_cache import ShowProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SequencePairs(LabelledTexts):
    """Samples of a text to read, and the tokens of a text to write as labels.

    The model itself shifts the labels to the inputs of its decoder.
    """

    task = "seq2seq"
    columns = ("target_column", "source_prefix")
    varies = True

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = ignore_progress,
        target_length: int = 128,
        cut_long: bool = False,
    ) -> None:
        self.target_length = target_length
        self.cut_long = cut_long
        self.key_settings = f" target {target_length} {cut_long}"
        super().__init__(source, tokenizer, length, show_progress)

    @staticmethod
    def read(row: Row, source: Corpus, first_label: Any) -> tuple[list[str], list[Any]]:
        """Return both texts."""
        texts = []
        for column in (source.text_column, source.target_column):
            text = require_column_value_of_allowed_length(row, column)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{row.location}: {column} is {text!r:.80}; it must be text")
            texts.append(text)
        return [source.source_prefix + texts[0], texts[1]], []

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        read = self._tokens_of_allowed_length(
            tokenizer, rows, "text", [row.text[0] for row in rows], "sequence_length", self.length
        )
        written = self._tokens_of_allowed_length(
            tokenizer, rows, "text_target", [row.text[1] for row in rows], "target_length",
            self.target_length,
        )  # fmt: skip
        return ([*ids, *labels, len(labels)] for ids, labels in zip(read, written))

    def _tokens_of_allowed_length(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow], argument: str,
        texts: list[str], limit_field: str, limit: int,
    ) -> list[list[int]]:  # fmt: skip
        """Return the token ids of texts, by the tokenizer's argument for them.

        Raises:
            DataError: a text is longer than the limit, and is not to be cut.
        """
        options: dict[str, Any] = {"truncation": True, "max_length": limit} if self.cut_long else {}
        token_ids: list[list[int]] = tokenizer(
            **{argument: texts}, return_attention_mask=False, verbose=False, **options
        )["input_ids"]
        for row, ids in zip(rows, token_ids):
            if len(ids) > limit:
                part = "to write" if argument == "text_target" else "that is read"
                raise DataError(
                    f"{row.location}: the text {part} has {len(ids)} tokens, and data.{limit_field} "
                    f"is {limit}; enlarge it, or cut all longer texts with data.cut_long=true"
                )
        return token_ids

    def size(self, index: int) -> int:
        return super().size(index) - int(document_tokens(self._documents, index)[-1])

    def _label_tensor_of_stored(self, stored_labels: NDArray[np.uint32]) -> torch.Tensor:
        labels = np.full(self.target_length, IGNORED, np.int64)
        labels[: len(stored_labels) - 1] = stored_labels[:-1]
        return torch.from_numpy(labels)

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return stored_numbers

"""Samples of questions about a context, whose answer is a span of it, as SQuAD has them.

A context that is longer than a sample is cut into windows that overlap by `stride` tokens. Each
window is a sample; where it does not contain the answer, both positions are the model's mark for
the whole text ([CLS]). A row is one document of the cache: for each window four rows of integers,
as long as its tokens, and its two positions; then the windows' lengths and their number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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

_Ints = NDArray[np.int64]
# The offset of a token that is not of the context.
_OUTSIDE = 2**32 - 1


class QuestionRow(NamedTuple):
    """A question with its context and all accepted answers."""

    question: str
    context: str
    answers: list[str]
    """Accepted answers; []: the context has none."""
    starts: list[int]
    """Index of the first character of each answer."""


class TokenWindow(NamedTuple):
    """The tokens of a window."""

    values: _Ints
    """(4, tokens): token ids, token types, and the first character and the end of each token of
    the context; `_OUTSIDE` for other tokens."""
    positions: _Ints
    """(2,): the answer's first and last token."""


class AnswerWindows(LabelledTexts):
    """Samples of questions and windows of their contexts, cut or padded to one length."""

    task = "question-answering"
    columns = ("question_column", "context_column", "answers_column")

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = ignore_progress,
        stride: int | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "data.tokenizer: does not report the characters of each token; use a fast tokenizer"
            )
        # run_qa.py's 128 of 384.
        self.stride = length // 3 if stride is None else stride
        self.key_settings = f" stride {self.stride}"
        self._pad_type = tokenizer.pad_token_type_id
        # [CLS], else the begin mark.
        self._marks = (tokenizer.cls_token_id, tokenizer.bos_token_id)
        self._with_types = "token_type_ids" in tokenizer.model_input_names
        super().__init__(source, tokenizer, length, show_progress)
        # The row of each window, its first integer, and its tokens.
        self._windows: _Ints = np.array([*self._row_start_and_size_of_windows()], np.int64)

    @staticmethod
    def read(row: Row, source: Corpus, first_label: Any) -> tuple[list[str], list[Any]]:
        """Return question and context, and the characters of the first answer."""
        question = require_question_row(row, source)
        spans = [
            (start, start + len(text)) for start, text in zip(question.starts, question.answers)
        ]
        labels = [TextPosition(character) for span in spans[:1] for character in span]
        return [question.question, question.context], labels

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        # SQuAD has questions with blanks before them.
        pairs = [(row.text[0].lstrip(), row.text[1]) for row in rows]
        self._require_room_for_context(tokenizer, rows, [question for question, _ in pairs])
        for row, pair in zip(rows, pairs):
            windows = [*self._windows_of_row(tokenizer, pair, row.label_integers)]
            integers = [part.ravel() for window in windows for part in window]
            sizes = [window.values.shape[1] for window in windows]
            yield np.concatenate([*integers, [*sizes, len(windows)]]).tolist()

    def _require_room_for_context(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow], questions: list[str]
    ) -> None:
        special_count = tokenizer.num_special_tokens_to_add(pair=True)
        token_ids = tokenizer(questions, add_special_tokens=False)["input_ids"]
        for row, ids in zip(rows, token_ids):
            room = self.length - special_count - len(ids)
            if room <= self.stride:
                raise DataError(
                    f"{row.location}: the question has {len(ids)} tokens, so that a sample of "
                    f"{self.length} has {max(0, room)} for its context, and windows overlap by "
                    f"data.stride: {self.stride}; shorten the question, enlarge "
                    "data.sequence_length, or lower data.stride"
                )

    def _windows_of_row(
        self, tokenizer: PreTrainedTokenizerBase, pair: tuple[str, str], answer: list[int]
    ) -> Iterator[TokenWindow]:
        encoding = tokenizer(
            *(pair[::-1] if self._on_the_left else pair),
            truncation="only_first" if self._on_the_left else "only_second",
            max_length=self.length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        for window_index, ids in enumerate(encoding["input_ids"]):
            sequences = encoding.sequence_ids(window_index)
            in_context = np.array(sequences) == (0 if self._on_the_left else 1)
            offsets = np.array(encoding["offset_mapping"][window_index]).T
            offsets = np.where(in_context, offsets, _OUTSIDE)
            types = encoding["token_type_ids"][window_index]
            positions = _token_span_or_none(offsets, np.flatnonzero(in_context), answer)
            yield TokenWindow(
                np.array([ids, types, *offsets], np.int64),
                np.array(positions or 2 * [_index_of_whole_text_mark(ids, self._marks)]),
            )

    def _row_start_and_size_of_windows(self) -> Iterator[tuple[int, int, int]]:
        # The last document is the summary.
        for row_index in range(len(self._documents.ends) - 1):
            document = document_tokens(self._documents, row_index)
            start = int(self._documents.ends[row_index]) - len(document)
            for size in document[-1 - int(document[-1]) : -1].tolist():
                yield row_index, start, size
                start += 4 * size + 2

    def __len__(self) -> int:
        return len(self._windows)

    def size(self, index: int) -> int:
        return int(self._windows[index, 2])

    def window(self, index: int) -> TokenWindow:
        """Return the tokens of a sample, without padding."""
        _, start, size = self._windows[index].tolist()
        integers = self._documents.tokens[start : start + 4 * size + 2].astype(np.int64)
        return TokenWindow(integers[:-2].reshape(4, size), integers[-2:])

    def sample(self, index: int, epoch: int) -> Sample:
        (ids, types, *_), positions = self.window(index)
        pad = self._pad_on_tokenizer_side
        tensors = {"input_ids": pad(ids, self._pad)}
        if self._with_types:
            tensors["token_type_ids"] = pad(types, self._pad_type)
        if self._with_mask:
            tensors["attention_mask"] = pad(np.ones_like(ids), 0)
        padding_before = self.length - len(ids) if self._on_the_left else 0
        start, end = torch.from_numpy(positions + padding_before)
        return {**tensors, "start_positions": start, "end_positions": end}

    def row_of_window(self, index: int) -> int:
        """Return the index of the question of a sample."""
        return int(self._windows[index, 0])

    def context_offsets_and_mark(self, index: int, length: int) -> tuple[_Ints, int]:
        """Return the characters of each token of a sample, and the position for "no answer".

        Args:
            index: the index of the sample.
            length: the length that its batch was padded to.

        Returns:
            (2, length), the first character and the end of each token; -1 outside of the context.
        """
        (ids, _, *offsets), _ = self.window(index)
        padded = torch.stack(
            [self._pad_on_tokenizer_side(characters, _OUTSIDE) for characters in offsets]
        ).numpy()
        kept = padded[:, self.length - length :] if self._on_the_left else padded[:, :length]
        mark = _index_of_whole_text_mark(ids.tolist(), self._marks)
        padding_before = length - len(ids) if self._on_the_left else 0
        return np.where(kept == _OUTSIDE, -1, kept), mark + padding_before

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return stored_numbers

    @functools.cached_property
    def questions(self) -> list[QuestionRow]:
        """The rows as texts; the first use reads them again."""
        return [
            require_question_row(row, self.source)  # type: ignore[arg-type]
            for row in read_corpus_rows_up_to_limit(self.source)
        ]


def _token_span_or_none(
    offsets: _Ints, context_tokens: _Ints, answer: Sequence[int]
) -> list[int] | None:
    """Return the first and the last token of an answer; None where a window does not have all of it.

    Args:
        offsets: (2, tokens): first character and end of each token.
        context_tokens: indices of the tokens of the context.
        answer: the first character of the answer, and its end; []: there is none.
    """
    starts, ends = offsets[:, context_tokens]
    if not answer or not len(starts) or starts[0] > answer[0] or ends[-1] < answer[1]:
        return None
    # The tokens around the answer, also where it begins or ends within a token.
    first_token, last_token = (starts <= answer[0]).nonzero()[0][-1], (ends >= answer[1]).argmax()
    return [int(context_tokens[first_token]), int(context_tokens[last_token])]


def _index_of_whole_text_mark(ids: list[int], marks: Sequence[int | None]) -> int:
    """Return the position that stands for "no answer here": that of the first mark, else 0."""
    return next((ids.index(mark) for mark in marks if mark in ids), 0)


def require_question_row(row: Row, source: Corpus) -> QuestionRow:
    """Return a row as texts; raises DataError where an answer is not in its context."""
    texts = []
    for column in (source.question_column, source.context_column):
        text = require_column_value_of_allowed_length(row, column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{row.location}: {column} is {text!r:.80}; it must be text")
        texts.append(text)
    question, context = texts
    answers = require_column_value_of_allowed_length(row, source.answers_column)
    is_named = isinstance(answers, dict)
    lists: list[Any] = [answers.get(name) for name in ("text", "answer_start")] if is_named else []
    if (
        not lists
        or not all(isinstance(column, list) for column in lists)
        or len({*map(len, lists)}) > 1
        or not all(isinstance(text, str) and text for text in lists[0])
        or not all(type(start) is int and start >= 0 for start in lists[1])
    ):
        raise DataError(
            f"{row.location}: {source.answers_column} is {answers!r:.80}; it must be "
            '{"text": [...], "answer_start": [...]}, with the first character of each text'
        )
    for text, start in zip(*lists):
        if not context.startswith(text, start):
            elsewhere = context.find(text)
            raise DataError(
                f"{row.location}: the answer {text!r:.80} is not at answer_start {start} of "
                f"{source.context_column}, which has {context[start : start + len(text)]!r:.80} there; "
                + (f"it is at {elsewhere}" if elsewhere >= 0 else "the context does not contain it")
            )
    return QuestionRow(question, context, *lists)

"""Tokenized chats with their answers marked: the model learns the answers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.base.cache import add_cache_note
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.chats.rows import (
    DEFAULT_SOURCE,
    Chat,
    read_chats_with_fraction_of_corpus_read,
)
from ortlaunch.worker.data.chats.template import ChatTemplate, PlainPrompts
from ortlaunch.worker.data.corpus import corpus_fingerprint
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    TokenizeWork,
    backend_without_truncation_or_padding,
    load_or_write_cached_tokens,
    token_range_of_document,
    tokenizer_text_for_cache_key,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A bit set in the tokens of answers; no vocabulary has so many tokens.
ANSWER = 1 << 31
# Chats whose tokens are in memory at once while answers are searched.
_CHATS_AT_ONCE = 256


def load_or_tokenize_chats_marking_trained_text(
    source: str | Corpus,
    tokenizer: PreTrainedTokenizerBase,
    show_progress: ShowProgress,
) -> Documents:
    """Return one document for each chat; tokens of answers have the bit ANSWER set.

    Args:
        source: the corpus.
        tokenizer: the tokenizer, with its chat template.
        show_progress: called with progress messages.

    Raises:
        DataError: there is no chat template, or a chat is invalid, or the template cannot render
            it; the message gives file and line.
    """
    settings, encode = cache_key_text_and_encoder_of_chats(source, tokenizer)
    # All that the tokens depend on; the 3 is the version of this format.
    key = f"chats 3 {corpus_fingerprint(source)} {settings}"
    return load_or_write_cached_tokens(
        TokenizeWork(key, lambda: read_chats_with_fraction_of_corpus_read(source), encode),
        show_progress,
    )


def cache_key_text_and_encoder_of_chats(
    source: str | Corpus, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, Callable[[list[Chat]], Iterable[Sequence[int]]]]:
    """Return the function from chats to tokens, and a text that determines it.

    Raises:
        DataError: there is no chat template.
    """
    corpus = source if isinstance(source, Corpus) else DEFAULT_SOURCE
    template = PlainPrompts(tokenizer, corpus) if corpus.prompt else ChatTemplate(tokenizer, corpus)
    key_text = (
        f"{template.text} {tokenizer.special_tokens_map} {tokenizer_text_for_cache_key(tokenizer)}"
    )
    backend = backend_without_truncation_or_padding(tokenizer)

    def encode(chats: list[Chat]) -> Iterator[Sequence[int]]:
        rendered_chats = [template.render(chat) for chat in chats]
        # The template has written the special tokens already.
        encoded = backend.encode_batch(
            [rendered.text for rendered in rendered_chats], add_special_tokens=False
        )
        for encoding, rendered in zip(encoded, rendered_chats):
            yield [*template.begin, *_token_ids_with_answer_bit(encoding, rendered.learned)]

    return key_text, encode


def _token_ids_with_answer_bit(
    encoding: Any, answer_character_ranges: list[range]
) -> Sequence[int]:
    """Return the token ids, with ANSWER set on each token that has a character of an answer."""
    ids = np.array(encoding.ids, np.uint32)
    token_ranges = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    for character_range in answer_character_ranges:
        # Tokens that overlap the answer; the last condition excludes tokens without characters.
        (inside,) = np.nonzero(
            (token_ranges[:, 1] > character_range.start)
            & (token_ranges[:, 0] < character_range.stop)
            & (token_ranges[:, 1] > token_ranges[:, 0])
        )
        # The whole range is marked, so that a token without characters within an answer counts too.
        if len(inside):
            ids[inside[0] : inside[-1] + 1] |= np.uint32(ANSWER)
    marked_ids: Sequence[int] = ids.tolist()
    return marked_ids


class ChatSamples:
    """Samples of one chat each, cut or padded to one length; answers alone have labels.

    A chat that has no answer within this length is left out.
    """

    varies = True

    def __init__(
        self,
        documents: Documents,
        length: int,
        padding_id: int,
        recipe_key: str,
        row_findings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Choose the chats that have something to learn.

        Args:
            documents: the tokens of all chats.
            length: tokens of a sample.
            padding_id: the token of padding.
            recipe_key: the recipe's field of the corpus, for messages; "": of a window of a stream,
                without messages.
            row_findings: findings of the rows for the audit, by name.

        Raises:
            DataError: no chat has something to learn.
        """
        self.tokens, self.ends = documents
        self.length = length
        self.pad = padding_id
        self.row_findings = row_findings
        sizes = np.diff(self.ends, prepend=0)
        # The mean loss over no labels would be nan.
        has_answer = _has_answer_token_by_chat(
            self.tokens, self.ends - sizes, np.minimum(sizes, length)
        )
        self.kept = np.flatnonzero(has_answer)
        cut_chats = int((sizes > length).sum())
        chats_without_answer = len(sizes) - len(self.kept)
        self.cut_before_answer = (
            int(
                (
                    ~has_answer & _has_answer_token_by_chat(self.tokens, self.ends - sizes, sizes)
                ).sum()
            )
            if chats_without_answer
            else 0
        )
        if not recipe_key:
            return
        if not len(self.kept):
            within = f" within its first {length} tokens (data.sequence_length)"
            without = " that counts in the loss (train_on, train_parts, train_key)"
            raise DataError(
                f"{recipe_key}: no chat has an answer{within if self.cut_before_answer else without}"
            )
        if cut_chats or chats_without_answer:
            add_cache_note(
                f"{recipe_key}: {cut_chats:,} of {len(sizes):,} chats are longer than data.sequence_length "
                f"({length}) and cut off"
                + (
                    f"; {chats_without_answer:,} without an answer before that are left out"
                    if chats_without_answer
                    else ""
                )
            )

    def __len__(self) -> int:
        return len(self.kept)

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample before padding."""
        chat = int(self.kept[index])
        return min(self.length, len(token_range_of_document(self.ends, chat)))

    def sample(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        chat = int(self.kept[index])
        token_range = token_range_of_document(self.ends, chat)[: self.length]
        marked = self.tokens[token_range.start : token_range.stop].astype(np.int64)
        token_count = len(marked)
        empty = self.length - len(marked)
        ids = np.pad(marked & (ANSWER - 1), (0, empty), constant_values=self.pad)
        labels = np.pad(
            np.where(marked & ANSWER, marked & (ANSWER - 1), IGNORED),
            (0, empty),
            constant_values=IGNORED,
        )
        mask = (np.arange(self.length) < token_count).astype(np.int64)
        tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(value) for name, value in tensors.items()}


def _has_answer_token_by_chat(
    tokens: Tokens, chat_begins: NDArray[np.int64], chat_sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return for each chat whether its first `chat_sizes` tokens have a token of an answer.

    The first token of a chat does not count, as nothing predicts it.

    Args:
        tokens: (tokens,) uint32, of all chats.
        chat_begins: (chats,) index of each chat's first token.
        chat_sizes: (chats,) number of tokens to search.
    """
    has_answer = np.zeros(len(chat_begins), bool)
    (long,) = np.nonzero(chat_sizes > 1)
    for first_chat in range(0, len(long), _CHATS_AT_ONCE):
        chats = long[first_chat : first_chat + _CHATS_AT_ONCE]
        begin = chat_begins[chats] + 1
        stops = chat_begins[chats] + chat_sizes[chats]
        is_answer = tokens[begin[0] : stops[-1]] >= ANSWER
        # `reduceat` reduces between each two indices; the last range goes to the end of the array.
        # Every second range lies between two chats, and is dropped.
        spans = np.stack([begin, stops], axis=1).ravel()[:-1] - begin[0]
        has_answer[chats] = np.logical_or.reduceat(is_answer, spans)[::2]
    return has_answer

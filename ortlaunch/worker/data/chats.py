"""Tokenized chats with their answers marked: the model learns the answers alone.

The tokenizer's chat template renders a chat. The template either marks answers itself, by
{% generation %}, or each answer is found by comparison: it is the text that the template adds for
the answer's message, after the template's own generation prompt.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.base.cache import add_cache_note
from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.worker.data.chat_rows import CALLS, Chat, read_chats_with_fraction_of_corpus_read
from ortlaunch.worker.data.corpus import corpus_fingerprint
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    TokenizeWork,
    backend_without_truncation_or_padding,
    begin_token_ids_added_to_text,
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
# Columns with the tools of a chat: today's, and the older one.
_TOOLS = ("tools", "functions")
_UNWRITTEN = (
    "and the chat template does not write them: use the template of a model that calls tools, or "
    "leave them out"
)
_WORD = re.compile(r"\w+")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderedChat(NamedTuple):
    """The text of a chat, rendered by the template."""

    text: str
    answers: list[range]
    """Character ranges of the answers in the text."""


def load_or_tokenize_chats_marking_trained_text(
    source: str | Corpus, tokenizer: PreTrainedTokenizerBase, show_progress: ShowProgress
) -> Documents:
    """Return one document for each chat; tokens of answers have the bit ANSWER set.

    Raises:
        DataError: there is no chat template, or a chat is invalid, or the template cannot render
            it; the message gives file and line.
    """
    corpus = source if isinstance(source, Corpus) else None
    template = (
        _PromptTemplate(tokenizer)
        if corpus and corpus.prompt
        else _ChatTemplate(tokenizer, corpus.train_on if corpus else "assistant")
    )
    # All that the tokens depend on; the 2 is the version of this format.
    key = (
        f"chats 2 {corpus_fingerprint(source)} {template.text} "
        f"{tokenizer.special_tokens_map} {tokenizer_text_for_cache_key(tokenizer)}"
    )
    backend = backend_without_truncation_or_padding(tokenizer)

    def encode(chats: list[Chat]) -> Iterator[Sequence[int]]:
        rendered_chats = [template.render(chat) for chat in chats]
        # The template has written the special tokens already.
        encoded = backend.encode_batch(
            [rendered.text for rendered in rendered_chats], add_special_tokens=False
        )
        for encoding, rendered, chat in zip(encoded, rendered_chats, chats):
            learned = _character_ranges_in_loss(rendered, chat, source, template.end_marks)
            yield [*template.begin, *_token_ids_with_answer_bit(encoding, learned)]

    return load_or_write_cached_tokens(
        TokenizeWork(key, lambda: read_chats_with_fraction_of_corpus_read(source), encode),
        show_progress,
    )


def _character_ranges_in_loss(
    rendered: RenderedChat, chat: Chat, source: str | Corpus, end_marks: tuple[str, ...]
) -> list[range]:
    """Return the ranges of the text that count in the loss, by the source's fields.

    Raises:
        DataError: messages say whether they count, and the template marks other passages.
    """
    if isinstance(source, str):
        return rendered.answers
    if source.train_on == "all":
        return [range(len(rendered.text))]
    ranges = rendered.answers[-1:] if source.train_on == "last" else rendered.answers
    if source.train_key:
        messages = [item for item in chat.messages if item["role"] == "assistant"]
        messages = messages[-1:] if source.train_on == "last" else messages
        if len(messages) != len(ranges):
            raise DataError(
                f"{chat.location}: the chat template marks {len(ranges)} passages, and "
                f"{len(messages)} answers may have {source.train_key}"
            )
        ranges = [
            item
            for item, message in zip(ranges, messages)
            if message.get(source.train_key) in (None, True)
        ]
    if source.train_on_end:
        return ranges
    return [
        item[: _length_without_end_mark(rendered.text[item.start : item.stop], end_marks)]
        for item in ranges
    ]


def _length_without_end_mark(answer_text: str, end_marks: tuple[str, ...]) -> int:
    """Return the length of an answer without its end mark, and without spaces around the mark."""
    stripped_text = answer_text.rstrip()
    mark = next((mark for mark in end_marks if stripped_text.endswith(mark)), "")
    return len(stripped_text.removesuffix(mark).rstrip()) if mark else len(answer_text)


class _PromptTemplate:
    """Prompts that are text already: the tokenizer's begin mark, prompt, response, end mark."""

    text = "prompts"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        _require_fast_tokenizer(tokenizer)
        if tokenizer.eos_token is None:
            raise DataError(
                "data.tokenizer has no eos_token, which ends a response; set "
                "data.special_tokens.eos_token"
            )
        self.begin = begin_token_ids_added_to_text(tokenizer)
        self.end_marks = (str(tokenizer.eos_token),)

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a prompt with its response, which ends with the end mark."""
        prompt, response = (str(message["content"]) for message in chat.messages)
        text = f"{prompt}{response.removesuffix(self.end_marks[0])}{self.end_marks[0]}"
        return RenderedChat(text, [range(len(prompt), len(text))])


def _require_fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            "data.tokenizer: does not report the positions of tokens in a text; use a fast "
            "tokenizer"
        )


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


class _ChatTemplate:
    """The tokenizer's chat template, which writes the begin mark, too."""

    begin = list[int]()

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        _require_fast_tokenizer(tokenizer)
        self.train_on = train_on
        if not tokenizer.chat_template:
            raise DataError(
                "data.tokenizer has no chat template; set data.chat_template to a Jinja file "
                f"or its text, usually from the model card, or one of {', '.join(CHAT_TEMPLATES)}"
            )
        self.tokenizer = tokenizer
        self.text = str(tokenizer.get_chat_template())
        self._uses_marks = _MARKED.search(self.text) is not None and train_on != "all"
        # What is no variable of a row: parameters of the call, and the tokenizer's own variables.
        reserved = {
            "messages",
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        self._names = {*_WORD.findall(self.text)} - reserved | {"tools", "documents"}
        added = tokenizer.added_tokens_decoder.values()
        self.end_marks = tuple(
            {
                *tokenizer.all_special_tokens,
                *(str(added_token) for added_token in added if added_token.special),
            }
        )

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a chat, with its answers.

        Raises:
            DataError: the template refuses the chat, or its answers cannot be located.
        """
        try:
            rendered = (
                self._render_with_generation_marks(chat)
                if self._uses_marks
                else self._render_and_locate_trained_text(chat)
            )
        except DataError:
            raise
        # Errors of Jinja, and any error that the template's own code raises.
        except Exception as error:
            line = getattr(error, "lineno", None)
            reason = " ".join(str(error).split())
            # A line number belongs to a syntax error of the template, not to this chat.
            if line:
                raise DataError(f"data.chat_template: line {line}: {reason}") from None
            raise DataError(f"{chat.location}: the chat template rejects it: {reason}") from None
        self._require_tools_in_rendered_text(chat, rendered.text)
        if not any(rendered.answers):
            raise DataError(f"{chat.location}: the chat template renders no answer")
        return rendered

    def _row_variables_used_by_template(self, chat: Chat) -> Json:
        """Return the columns of a row that the template may write, by name."""
        variables = {
            name: value for name, value in chat.columns.items() if name in self._names and value
        }
        # Many data sets have the tools as JSON, for their forms differ from row to row.
        if isinstance(variables.get("tools"), str):
            variables["tools"] = json.loads(variables["tools"])
        return variables

    def _require_tools_in_rendered_text(self, chat: Chat, chat_text: str) -> None:
        """Refuse a chat whose tools, or calls of them, the template leaves out.

        Raises:
            DataError: the text is the same without them.
        """
        variables = self._row_variables_used_by_template(chat)
        for name in (key_or_value for key_or_value in _TOOLS if chat.columns.get(key_or_value)):
            if chat_text == self._apply_template_or_empty(
                chat.messages, **{**variables, name: None}
            ):
                raise DataError(f"{chat.location}: the row has {name}, {_UNWRITTEN}")
        for message_index, message in enumerate(chat.messages):
            for name in (key_or_value for key_or_value in CALLS if message.get(key_or_value)):
                message_without = {
                    key: key_or_value for key, key_or_value in message.items() if key != name
                }
                messages = [
                    *chat.messages[:message_index],
                    message_without,
                    *chat.messages[message_index + 1 :],
                ]
                if chat_text == self._apply_template_or_empty(messages, **variables):
                    raise DataError(
                        f"{chat.location}: message {message_index + 1} has {name}, {_UNWRITTEN}"
                    )

    def _render_with_generation_marks(self, chat: Chat) -> RenderedChat:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: object = render_jinja_template(
            conversations=[chat.messages], chat_template=self.text, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map, **self._row_variables_used_by_template(chat),  # of the template
        )  # fmt: skip
        # transformers annotates the result as str.
        texts, answers = cast("tuple[list[str], list[list[tuple[int, int]]]]", rendered)
        return RenderedChat(texts[0], [range(*answer) for answer in answers[0]])

    def _render_and_locate_trained_text(self, chat: Chat) -> RenderedChat:
        messages = chat.messages
        chat_text = self._apply_template_or_empty(
            messages, **self._row_variables_used_by_template(chat)
        )
        # A template may rewrite earlier turns, so no more answers are searched than count.
        if self.train_on == "all":
            return RenderedChat(chat_text, [range(len(chat_text))])
        all_answer_indices = [
            message_index
            for message_index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        answer_indices = all_answer_indices[-1:] if self.train_on == "last" else all_answer_indices
        return RenderedChat(
            chat_text,
            [
                self._answer_character_range(chat_text, chat, message_index)
                for message_index in answer_indices
            ],
        )

    def _answer_character_range(self, chat_text: str, chat: Chat, message_index: int) -> range:
        """Return the character range of an answer: from after the generation prompt.

        The range includes the end mark, but not the line end after the mark.
        """
        text_before = self._render_first_messages_as_chat_begins(chat_text, chat, message_index)
        text_through = self._render_first_messages_as_chat_begins(
            chat_text, chat, message_index + 1
        )
        if not (chat_text.startswith(text_before) and chat_text.startswith(text_through)):
            raise DataError(
                f"{chat.location}: the chat template renders message {message_index + 1} differently when "
                "others follow, so its answers cannot be located: put {% generation %} and "
                "{% endgeneration %} around them in data.chat_template"
            )
        variables = self._row_variables_used_by_template(chat)
        prompt = self._apply_template_or_empty(
            chat.messages[:message_index], add_generation_prompt=True, **variables
        )
        start = len(prompt) if chat_text.startswith(prompt) else len(text_before)
        stripped_text = text_through.rstrip()
        # Of two end marks, as of Phi-3's last answer, the first one ends the answer.
        bare = stripped_text.removesuffix(self.tokenizer.eos_token or "").rstrip()
        stripped_text = (
            bare if bare != stripped_text and bare.endswith(self.end_marks) else stripped_text
        )
        ends_with_mark = stripped_text.endswith(self.end_marks)
        return range(start, len(stripped_text if ends_with_mark else text_through))

    def _render_first_messages_as_chat_begins(
        self, chat_text: str, chat: Chat, message_count: int
    ) -> str:
        """Return the text of the first messages, as the text of the whole chat begins."""
        text = self._apply_template_or_empty(
            chat.messages[:message_count], **self._row_variables_used_by_template(chat)
        )
        # Some templates, as Phi-3's, write an end mark behind the last message of a chat.
        return (
            text
            if chat_text.startswith(text)
            else text.removesuffix(self.tokenizer.eos_token or "")
        )

    def _apply_template_or_empty(self, messages: list[dict[str, object]], **options: Any) -> str:
        if not messages:
            return ""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))


class ChatSamples:
    """Samples of one chat each, cut or padded to one length; answers alone have labels.

    A chat that has no answer within this length is left out.
    """

    varies = True

    def __init__(self, documents: Documents, length: int, padding_id: int, recipe_key: str) -> None:
        self.tokens, self.ends = documents
        self.length = length
        self.pad = padding_id
        sizes = np.diff(self.ends, prepend=0)
        # The mean loss over no labels would be nan.
        self.kept = np.flatnonzero(
            _has_answer_token_by_chat(self.tokens, self.ends - sizes, np.minimum(sizes, length))
        )
        cut_chats = int((sizes > length).sum())
        chats_without_answer = len(sizes) - len(self.kept)
        if not len(self.kept):
            raise DataError(
                f"{recipe_key}: no chat has an answer within its first {length} tokens "
                "(data.sequence_length)"
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

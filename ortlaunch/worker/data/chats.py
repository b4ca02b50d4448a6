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

from ortlaunch.cache import add_cache_note
from ortlaunch.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.worker.data.chat_rows import CALLS, Chat, chats_read
from ortlaunch.worker.data.corpus import fingerprint
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    Work,
    begin_of_text,
    plain_backend,
    stored,
    vocabulary_of,
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


class Rendered(NamedTuple):
    """The text of a chat, rendered by the template."""

    text: str
    answers: list[tuple[int, int]]
    """Character ranges [first, after) of the answers in the text."""


def tokenized_chats(
    source: str | Corpus, tokenizer: PreTrainedTokenizerBase, show_progress: ShowProgress
) -> Documents:
    """Return one document for each chat; tokens of answers have the bit ANSWER set.

    Raises:
        DataError: there is no chat template, or a chat is invalid, or the template cannot render
            it; the message gives file and line.
    """
    corpus = source if isinstance(source, Corpus) else None
    template = (
        _Prompts(tokenizer)
        if corpus and corpus.prompt
        else _Template(tokenizer, corpus.train_on if corpus else "assistant")
    )
    # All that the tokens depend on; the 2 is the version of this format.
    key = (
        f"chats 2 {fingerprint(source)} {template.text} "
        f"{tokenizer.special_tokens_map} {vocabulary_of(tokenizer)}"
    )
    backend = plain_backend(tokenizer)

    def encode(chats: list[Chat]) -> Iterator[Sequence[int]]:
        written = [template.render(chat) for chat in chats]
        # The template has written the special tokens already.
        encoded = backend.encode_batch([each.text for each in written], add_special_tokens=False)
        for found, each, chat in zip(encoded, written, chats):
            learned = _learned(each, chat, source, template.end_marks)
            yield [*template.begin, *_marked(found, learned)]

    return stored(Work(key, lambda: chats_read(source), encode), show_progress)


def _learned(
    found: Rendered, chat: Chat, source: str | Corpus, end_marks: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Return the ranges of the text that count in the loss, by the source's fields.

    Raises:
        DataError: messages say whether they count, and the template marks other passages.
    """
    if isinstance(source, str):
        return found.answers
    if source.train_on == "all":
        return [(0, len(found.text))]
    chosen = found.answers[-1:] if source.train_on == "last" else found.answers
    if source.train_key:
        messages = [each for each in chat.messages if each["role"] == "assistant"]
        messages = messages[-1:] if source.train_on == "last" else messages
        if len(messages) != len(chosen):
            raise DataError(
                f"{chat.place}: the chat template marks {len(chosen)} passages, and "
                f"{len(messages)} answers may have {source.train_key}"
            )
        chosen = [
            each
            for each, message in zip(chosen, messages)
            if message.get(source.train_key) in (None, True)
        ]
    if source.train_on_end:
        return chosen
    return [
        (first, _before_mark(found.text[first:after], end_marks) + first) for first, after in chosen
    ]


def _before_mark(text: str, end_marks: tuple[str, ...]) -> int:
    """Return the length of an answer without its end mark, and without spaces around the mark."""
    shown = text.rstrip()
    mark = next((mark for mark in end_marks if shown.endswith(mark)), "")
    return len(shown.removesuffix(mark).rstrip()) if mark else len(text)


class _Prompts:
    """Prompts that are text already: the tokenizer's begin mark, prompt, response, end mark."""

    text = "prompts"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        _require_offsets(tokenizer)
        if tokenizer.eos_token is None:
            raise DataError(
                "data.tokenizer has no eos_token, which ends a response; set "
                "data.special_tokens.eos_token"
            )
        self.begin = begin_of_text(tokenizer)
        self.end_marks = (str(tokenizer.eos_token),)

    def render(self, chat: Chat) -> Rendered:
        """Return the text of a prompt with its response, which ends with the end mark."""
        prompt, response = (str(message["content"]) for message in chat.messages)
        text = f"{prompt}{response.removesuffix(self.end_marks[0])}{self.end_marks[0]}"
        return Rendered(text, [(len(prompt), len(text))])


def _require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            "data.tokenizer: does not report the positions of tokens in a text; use a fast "
            "tokenizer"
        )


def _marked(encoded: Any, answers: list[tuple[int, int]]) -> Sequence[int]:
    """Return the token ids, with ANSWER set on each token that has a character of an answer."""
    ids = np.array(encoded.ids, np.uint32)
    places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    for first, after in answers:
        # Tokens that overlap the answer; the last condition excludes tokens without characters.
        (inside,) = np.nonzero(
            (places[:, 1] > first) & (places[:, 0] < after) & (places[:, 1] > places[:, 0])
        )
        # The whole range is marked, so that a token without characters within an answer counts too.
        if len(inside):
            ids[inside[0] : inside[-1] + 1] |= np.uint32(ANSWER)
    found: Sequence[int] = ids.tolist()
    return found


class _Template:
    """The tokenizer's chat template, which writes the begin mark, too."""

    begin = list[int]()

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        _require_offsets(tokenizer)
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
            {*tokenizer.all_special_tokens, *(str(each) for each in added if each.special)}
        )

    def render(self, chat: Chat) -> Rendered:
        """Return the text of a chat, with its answers.

        Raises:
            DataError: the template refuses the chat, or its answers cannot be located.
        """
        try:
            found = self._marked(chat) if self._uses_marks else self._compared(chat)
        except DataError:
            raise
        # Errors of Jinja, and any error that the template's own code raises.
        except Exception as error:
            line = getattr(error, "lineno", None)
            why = " ".join(str(error).split())
            # A line number belongs to a syntax error of the template, not to this chat.
            if line:
                raise DataError(f"data.chat_template: line {line}: {why}") from None
            raise DataError(f"{chat.place}: the chat template rejects it: {why}") from None
        self._require_written(chat, found.text)
        if not any(after > first for first, after in found.answers):
            raise DataError(f"{chat.place}: the chat template renders no answer")
        return found

    def _variables(self, chat: Chat) -> Json:
        """Return the columns of a row that the template may write, by name."""
        found = {name: each for name, each in chat.columns.items() if name in self._names and each}
        # Many data sets have the tools as JSON, for their forms differ from row to row.
        if isinstance(found.get("tools"), str):
            found["tools"] = json.loads(found["tools"])
        return found

    def _require_written(self, chat: Chat, whole: str) -> None:
        """Refuse a chat whose tools, or calls of them, the template leaves out.

        Raises:
            DataError: the text is the same without them.
        """
        variables = self._variables(chat)
        for name in (each for each in _TOOLS if chat.columns.get(each)):
            if whole == self._text(chat.messages, **{**variables, name: None}):
                raise DataError(f"{chat.place}: the row has {name}, {_UNWRITTEN}")
        for number, message in enumerate(chat.messages):
            for name in (each for each in CALLS if message.get(each)):
                without = {key: each for key, each in message.items() if key != name}
                messages = [*chat.messages[:number], without, *chat.messages[number + 1 :]]
                if whole == self._text(messages, **variables):
                    raise DataError(f"{chat.place}: message {number + 1} has {name}, {_UNWRITTEN}")

    def _marked(self, chat: Chat) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: object = render_jinja_template(
            conversations=[chat.messages], chat_template=self.text, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map, **self._variables(chat),  # of the template
        )  # fmt: skip
        # transformers annotates the result as str.
        texts, answers = cast("tuple[list[str], list[list[tuple[int, int]]]]", rendered)
        return Rendered(texts[0], [(first, after) for first, after in answers[0]])

    def _compared(self, chat: Chat) -> Rendered:
        messages = chat.messages
        whole = self._text(messages, **self._variables(chat))
        # A template may rewrite earlier turns, so no more answers are searched than count.
        if self.train_on == "all":
            return Rendered(whole, [(0, len(whole))])
        numbers = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
        chosen = numbers[-1:] if self.train_on == "last" else numbers
        return Rendered(whole, [self._answer(whole, chat, number) for number in chosen])

    def _answer(self, whole: str, chat: Chat, number: int) -> tuple[int, int]:
        """Return the character range of an answer: from after the generation prompt.

        The range includes the end mark, but not the line end after the mark.
        """
        before = self._begin(whole, chat, number)
        after = self._begin(whole, chat, number + 1)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"{chat.place}: the chat template renders message {number + 1} differently when "
                "others follow, so its answers cannot be located: put {% generation %} and "
                "{% endgeneration %} around them in data.chat_template"
            )
        variables = self._variables(chat)
        prompt = self._text(chat.messages[:number], add_generation_prompt=True, **variables)
        first = len(prompt) if whole.startswith(prompt) else len(before)
        shown = after.rstrip()
        # Of two end marks, as of Phi-3's last answer, the first one ends the answer.
        bare = shown.removesuffix(self.tokenizer.eos_token or "").rstrip()
        shown = bare if bare != shown and bare.endswith(self.end_marks) else shown
        return first, len(shown) if shown.endswith(self.end_marks) else len(after)

    def _begin(self, whole: str, chat: Chat, count: int) -> str:
        """Return the text of the first messages, as the text of the whole chat begins."""
        text = self._text(chat.messages[:count], **self._variables(chat))
        # Some templates, as Phi-3's, write an end mark behind the last message of a chat.
        return text if whole.startswith(text) else text.removesuffix(self.tokenizer.eos_token or "")

    def _text(self, messages: list[Json], **options: Any) -> str:
        if not messages:
            return ""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))


class Conversations:
    """Samples of one chat each, cut or padded to one length; answers alone have labels.

    A chat that has no answer within this length is left out.
    """

    varies = True

    def __init__(self, documents: Documents, length: int, pad: int, name: str) -> None:
        self.tokens, self.ends = documents
        self.length = length
        self.pad = pad
        sizes = np.diff(self.ends, prepend=0)
        # The mean loss over no labels would be nan.
        self.kept = np.flatnonzero(
            _has_answer(self.tokens, self.ends - sizes, np.minimum(sizes, length))
        )
        cut = int((sizes > length).sum())
        without = len(sizes) - len(self.kept)
        if not len(self.kept):
            raise DataError(
                f"{name}: no chat has an answer within its first {length} tokens "
                "(data.sequence_length)"
            )
        if cut or without:
            add_cache_note(f"{name}: {cut:,} of {len(sizes):,} chats are longer than data.sequence_length "
                 f"({length}) and cut off"
                 + (f"; {without:,} without an answer before that are left out" if without else ""))  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample before padding."""
        chat = int(self.kept[index])
        return min(self.length, int(self.ends[chat]) - (int(self.ends[chat - 1]) if chat else 0))

    def sample(self, index: int, epoch: int) -> dict[str, torch.Tensor]:
        chat = int(self.kept[index])
        begin = int(self.ends[chat - 1]) if chat else 0
        marked = self.tokens[begin : min(int(self.ends[chat]), begin + self.length)].astype(
            np.int64
        )
        found = len(marked)
        empty = self.length - len(marked)
        ids = np.pad(marked & (ANSWER - 1), (0, empty), constant_values=self.pad)
        labels = np.pad(
            np.where(marked & ANSWER, marked & (ANSWER - 1), IGNORED),
            (0, empty),
            constant_values=IGNORED,
        )
        mask = (np.arange(self.length) < found).astype(np.int64)
        tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(value) for name, value in tensors.items()}


def _has_answer(
    tokens: Tokens, begins: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return for each chat whether its first `sizes` tokens have a token of an answer.

    The first token of a chat does not count, as nothing predicts it.

    Args:
        tokens: (tokens,) uint32, of all chats.
        begins: (chats,) index of each chat's first token.
        sizes: (chats,) number of tokens to search.
    """
    found = np.zeros(len(begins), bool)
    (long,) = np.nonzero(sizes > 1)
    for first in range(0, len(long), _CHATS_AT_ONCE):
        chats = long[first : first + _CHATS_AT_ONCE]
        begin = begins[chats] + 1
        after = begins[chats] + sizes[chats]
        read = tokens[begin[0] : after[-1]] >= ANSWER
        # `reduceat` reduces between each two indices; the last range goes to the end of the array.
        # Every second range lies between two chats, and is dropped.
        spans = np.stack([begin, after], axis=1).ravel()[:-1] - begin[0]
        found[chats] = np.logical_or.reduceat(read, spans)[::2]
    return found

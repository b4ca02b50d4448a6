"""Chats in tokens, and which of them are answers: the model learns those alone.

The tokenizer's chat template writes a chat. What is an answer in it the template says itself, by {% generation %}, or
it is found: what the template writes more when an answer is there, after its own prompt for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.cache import note
from ortlaunch.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.chat_rows import Chat, chats_read
from ortlaunch.worker.data.corpus import fingerprint
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.tokens import Documents, Tell, Work, plain_backend, stored, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = 1 << 31  # set in the tokens of answers
_CHATS_AT_ONCE = 256
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A chat as its template writes it."""

    text: str
    answers: list[tuple[int, int]]
    """First letter of each, and after the last."""


def tokenized_chats(
    source: str | Corpus, tokenizer: PreTrainedTokenizerBase, tell: Tell
) -> Documents:
    """A chat each, the tokens of answers with the bit ANSWER.

    Raises:
        DataError: there is no chat template, or a chat is none, or the template cannot write it; with file and line.
    """
    template = _Template(tokenizer)
    key = f"chats 1 {fingerprint(source)} {template.text} {tokenizer.special_tokens_map} {vocabulary_of(tokenizer)}"
    backend = plain_backend(tokenizer)

    def encode(chats: list[Chat]) -> Iterator[Sequence[int]]:
        written = [template.render(chat) for chat in chats]
        encoded = backend.encode_batch([each.text for each in written], add_special_tokens=False)
        return (_marked(found, each.answers) for found, each in zip(encoded, written))

    return stored(Work(key, lambda: chats_read(source), encode), tell)


def _marked(encoded: Any, answers: list[tuple[int, int]]) -> Sequence[int]:
    """From the first token that has a letter of an answer to the last that has one."""
    ids = np.array(encoded.ids, np.uint32)
    places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    for first, after in answers:
        (inside,) = np.nonzero(
            (places[:, 1] > first) & (places[:, 0] < after) & (places[:, 1] > places[:, 0])
        )
        if len(inside):
            ids[inside[0] : inside[-1] + 1] |= np.uint32(ANSWER)
    found: Sequence[int] = ids.tolist()
    return found


class _Template:
    """The tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                "data.tokenizer: does not tell where its tokens are in a text, as fast tokenizers do"
            )
        if not tokenizer.chat_template:
            raise DataError(
                "data.tokenizer has no chat template; give one, as its model's card has it: data.chat_template, a "
                "Jinja file or its text"
            )
        self.tokenizer = tokenizer
        self.text = str(tokenizer.get_chat_template())
        self.marks = _MARKED.search(self.text) is not None
        added = tokenizer.added_tokens_decoder.values()
        self.end_marks = tuple(
            {*tokenizer.all_special_tokens, *(str(each) for each in added if each.special)}
        )

    def render(self, chat: Chat) -> Rendered:
        """A chat, with its answers.

        Raises:
            DataError: the template refuses it, or does not show which of it are answers.
        """
        try:
            found = self._marked(chat) if self.marks else self._compared(chat)
        except DataError:
            raise
        except Exception as error:  # Jinja's, and whatever a template's own code raises
            line = getattr(error, "lineno", None)
            why = " ".join(str(error).split())
            if line:  # of the template: it is none
                raise DataError(f"data.chat_template: line {line}: {why}") from None
            raise DataError(f"{chat.place}: the chat template refuses it: {why}") from None
        if not any(after > first for first, after in found.answers):
            raise DataError(f"{chat.place}: the chat template writes no answer of it")
        return found

    def _marked(self, chat: Chat) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: object = render_jinja_template(
            conversations=[chat.messages], chat_template=self.text, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,  # type: ignore[arg-type]  # variables of the template
        )  # fmt: skip
        texts, answers = cast(
            "tuple[list[str], list[list[tuple[int, int]]]]", rendered
        )  # annotated as str
        return Rendered(texts[0], [(first, after) for first, after in answers[0]])

    def _compared(self, chat: Chat) -> Rendered:
        messages = chat.messages
        whole = self._text(messages)
        answers = [
            self._answer(whole, chat, number)
            for number, each in enumerate(messages)
            if each["role"] == "assistant"
        ]
        return Rendered(whole, answers)

    def _answer(self, whole: str, chat: Chat, number: int) -> tuple[int, int]:
        """After the prompt for an answer, with the end mark, without the line end after that."""
        before = self._text(chat.messages[:number])
        after = self._text(chat.messages[: number + 1])
        if not (whole.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"{chat.place}: the chat template writes message {number + 1} in another way when others follow, so "
                "that its answers cannot be told: put {% generation %} and {% endgeneration %} around them in "
                "data.chat_template"
            )
        prompt = self._text(chat.messages[:number], add_generation_prompt=True)
        first = len(prompt) if whole.startswith(prompt) else len(before)
        shown = after.rstrip()
        return first, len(shown) if shown.endswith(self.end_marks) else len(after)

    def _text(self, messages: list[Json], **options: Any) -> str:
        if not messages:
            return ""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))


class Conversations:
    """A chat a sample, cut or padded to one length; answers alone have labels. Without one it is none."""

    varies = True

    def __init__(self, documents: Documents, length: int, pad: int, name: str) -> None:
        self.tokens, self.ends = documents
        self.length = length
        self.pad = pad
        sizes = np.diff(self.ends, prepend=0)
        self.kept = np.flatnonzero(
            _has_answer(self.tokens, self.ends - sizes, np.minimum(sizes, length))
        )
        cut = int((sizes > length).sum())
        without = len(sizes) - len(self.kept)
        if not len(self.kept):
            raise DataError(
                f"{name}: no chat has an answer within its first {length} tokens (data.sequence_length)"
            )
        if cut or without:
            note(f"{name}: {cut:,} of {len(sizes):,} chats are longer than data.sequence_length ({length}) and cut off"
                 + (f"; {without:,} are left out, whose answers are all behind that" if without else ""))  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def size(self, index: int) -> int:
        """Tokens of a sample before padding."""
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
    """Of each chat, whether so many of its tokens have one of an answer, the first aside, which nothing predicts."""
    found = np.zeros(len(begins), bool)
    (long,) = np.nonzero(sizes > 1)
    for first in range(0, len(long), _CHATS_AT_ONCE):
        chats = long[first : first + _CHATS_AT_ONCE]
        begin = begins[chats] + 1
        after = begins[chats] + sizes[chats]
        read = tokens[begin[0] : after[-1]] >= ANSWER
        spans = (
            np.stack([begin, after], axis=1).ravel()[:-1] - begin[0]
        )  # the last one goes up to the end
        found[chats] = np.logical_or.reduceat(read, spans)[::2]
    return found

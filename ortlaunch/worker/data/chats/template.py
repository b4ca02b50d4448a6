"""The text of a chat, and the passages that count in the loss.

The tokenizer's chat template renders a chat. The template either marks answers itself, by
{% generation %}, or each answer is found by comparison: it is the text that the template adds for
the answer's message, after the template's own generation prompt.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.worker.data.chats.calls import (
    json_in_json_of_arguments,
    messages_with_arguments_in_other_form,
)
from ortlaunch.worker.data.chats.parts import (
    PARTS,
    THOUGHTS_PART,
    RewrittenTurns,
    part_ranges_of_answers,
)
from ortlaunch.worker.data.chats.rows import THOUGHTS, Chat, learned_answer_indices
from ortlaunch.worker.data.chats.unwritten_parts import refuse_unwritten_parts
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.token_cache import begin_token_ids_added_to_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r"\w+")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# TRL's name of a column with more arguments of the template.
_ROW_ARGUMENTS = "chat_template_kwargs"


class RenderedChat(NamedTuple):
    """The text of a chat, rendered by the template."""

    text: str
    learned: list[range]
    """Character ranges that count in the loss."""


class PlainPrompts:
    """Prompts that are text already: the tokenizer's begin mark, prompt, response, end mark."""

    text = "prompts"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: Corpus) -> None:
        _require_fast_tokenizer(tokenizer)
        if tokenizer.eos_token is None:
            raise DataError(
                "data.tokenizer has no eos_token, which ends a response; set "
                "data.special_tokens.eos_token"
            )
        self.source = source
        self.begin = begin_token_ids_added_to_text(tokenizer)
        self.end_mark = str(tokenizer.eos_token)

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a prompt with its response, which ends with the end mark."""
        prompt, response = (str(message["content"]) for message in chat.messages)
        text = f"{prompt}{response.removesuffix(self.end_mark)}{self.end_mark}"
        if self.source.train_on == "all":
            return RenderedChat(text, [range(len(text))])
        answer = range(len(prompt), len(text))
        ranges = (
            [answer]
            if self.source.train_on_end
            else _without_end_marks(text, [answer], (self.end_mark,))
        )
        return RenderedChat(text, ranges)


class ChatTemplate:
    """The tokenizer's chat template, which writes the begin mark, too."""

    begin = list[int]()

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: Corpus) -> None:
        _require_fast_tokenizer(tokenizer)
        if not tokenizer.chat_template:
            raise DataError(
                "data.tokenizer has no chat template; set data.chat_template to a Jinja file "
                f"or its text, usually from the model card, or one of {', '.join(CHAT_TEMPLATES)}"
            )
        self.tokenizer = tokenizer
        self.source = source
        self.text = str(tokenizer.get_chat_template())
        self._uses_marks = _MARKED.search(self.text) is not None and source.train_on != "all"
        # What is no variable of a row: parameters of the call, and the tokenizer's own variables.
        reserved = {
            "messages",
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        self._names = {*_WORD.findall(self.text)} - reserved
        self._thoughts_keys = [
            key for key in THOUGHTS if re.search(rf"""(?:\.|['"]){key}\b""", self.text)
        ]
        added = tokenizer.added_tokens_decoder.values()
        self.end_marks = tuple(
            {
                *tokenizer.all_special_tokens,
                *(str(added_token) for added_token in added if added_token.special),
            }
        )

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a chat, with what counts in the loss.

        Raises:
            DataError: the template refuses the chat, or leaves a part of it out, or its answers
                cannot be located.
        """
        for name in chat.columns.get(_ROW_ARGUMENTS) or {}:
            if name not in self._names:
                raise DataError(
                    f"{chat.location}: {_ROW_ARGUMENTS}: {name} has no effect: the chat template does not "
                    "name it; leave it out"
                )
        try:
            chat, text = self._chat_in_accepted_form_and_text(self._with_names_of_template(chat))
            answers = self._marked_answers(chat) if self._uses_marks else None
            refuse_unwritten_parts(chat, text, self._text_of_chat, self.source, self.text)
            if answers is None:
                answers = self._located_answers(chat, text)
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
        if not any(answers) and learned_answer_indices(chat.messages, self.source):
            raise DataError(f"{chat.location}: the chat template renders no answer")
        return RenderedChat(text, self._learned_ranges(chat, text, answers))

    def _with_names_of_template(self, chat: Chat) -> Chat:
        """Return a chat with the template's keys for thoughts, and for calls in the older form."""
        has_new_calls = "tool_calls" in self._names and "function_call" not in self._names
        messages = list[Json]()
        for message in chat.messages:
            renamed = {**message}
            keys = [key for key in THOUGHTS if message.get(key)]
            if self._thoughts_keys and len(keys) == 1 and keys[0] not in self._thoughts_keys:
                renamed[self._thoughts_keys[0]] = renamed.pop(keys[0])
            if has_new_calls and "function_call" in message and "tool_calls" not in message:
                call = {"type": "function", "function": renamed.pop("function_call")}
                renamed["tool_calls"] = [call]
            if has_new_calls and message["role"] == "function":
                renamed["role"] = "tool"
            messages.append(renamed)
        return dataclasses.replace(chat, messages=messages)

    def _chat_in_accepted_form_and_text(self, chat: Chat) -> tuple[Chat, str]:
        """Return a chat with arguments of calls as the template takes them: objects, or their JSON."""
        errors = list[Exception]()
        other_messages = messages_with_arguments_in_other_form(chat.messages)
        for form in (chat, dataclasses.replace(chat, messages=other_messages)):
            try:
                text = self._text_of_chat(form)
            # Errors of Jinja, and any error that the template's own code raises.
            except Exception as error:
                errors.append(error)
                continue
            if not any(escaped in text for escaped in json_in_json_of_arguments(form.messages)):
                return form, text
        raise errors[0]

    def _row_variables_used_by_template(self, chat: Chat) -> Json:
        """Return the columns of a row that the template may write, by name."""
        names = {*self._names, "tools", "documents"}
        columns = {name: value for name, value in chat.columns.items() if name in names and value}
        return {**columns, **(chat.columns.get(_ROW_ARGUMENTS) or {})}

    def _text_of_chat(self, chat: Chat) -> str:
        return self._apply_template_or_empty(
            chat.messages, **self._row_variables_used_by_template(chat)
        )

    def _marked_answers(self, chat: Chat) -> list[range]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: object = render_jinja_template(
            conversations=[chat.messages], chat_template=self.text, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map, **self._row_variables_used_by_template(chat),  # of the template
        )  # fmt: skip
        # transformers annotates the result as str.
        _, answers = cast("tuple[list[str], list[list[tuple[int, int]]]]", rendered)
        return [range(*answer) for answer in answers[0]]

    def _located_answers(self, chat: Chat, chat_text: str) -> list[range]:
        # A template may rewrite earlier turns, so no more answers are searched than count.
        if self.source.train_on == "all":
            return [range(len(chat_text))]
        return [
            self._answer_character_range(chat_text, chat, message_index)
            for message_index in learned_answer_indices(chat.messages, self.source)
        ]

    def _learned_ranges(self, chat: Chat, chat_text: str, answers: list[range]) -> list[range]:
        """Return the ranges that count in the loss, by the fields of the source."""
        source = self.source
        if source.train_on == "all":
            return answers
        learned_indices = learned_answer_indices(chat.messages, source)
        has_other_answers = self._uses_marks and len(learned_indices) < sum(
            message["role"] == "assistant" for message in chat.messages
        )
        # By marks, the ranges of an answer are as many as the template likes.
        if {*source.train_parts} == PARTS and not has_other_answers:
            ranges = answers
        else:
            pieces = part_ranges_of_answers(
                chat, chat_text, self._text_of_chat, answers,
                learned_indices if THOUGHTS_PART in source.train_parts else (),
            )  # fmt: skip
            ranges = [
                piece.characters
                for piece in pieces
                if piece.part in source.train_parts and piece.message_index in learned_indices
            ]
        return (
            ranges if source.train_on_end else _without_end_marks(chat_text, ranges, self.end_marks)
        )

    def _answer_character_range(self, chat_text: str, chat: Chat, message_index: int) -> range:
        """Return the character range of an answer: from after the generation prompt.

        The range includes the end mark, but not the line end after the mark.
        """
        text_before = self._render_first_messages_as_chat_begins(chat_text, chat, message_index)
        text_through = self._render_first_messages_as_chat_begins(
            chat_text, chat, message_index + 1
        )
        messages_before = chat.messages[:message_index]
        variables = self._row_variables_used_by_template(chat)
        prompt = self._apply_template_or_empty(
            messages_before, add_generation_prompt=True, **variables
        )
        end = self._end_of_last_answer(text_through, messages_before, variables)
        if chat_text.startswith(text_before) and chat_text.startswith(text_through):
            # A prompt may begin thoughts that the text of an answer has not.
            return range(max(len(text_before), _common_prefix_length(chat_text, prompt)), end)
        if THOUGHTS_PART not in self.source.train_parts:
            turns = RewrittenTurns(chat, chat_text, self._text_of_chat)
            if answer := turns.answer_range_or_none(message_index, prompt, end):
                return answer
        last_alone = (
            "" if self.source.train_on == "last" else "learn the last one (train_on: last), "
        )
        raise DataError(
            f"{chat.location}: the chat template renders message {message_index + 1} differently when "
            "others follow, so its answers cannot be located: put {% generation %} and {% endgeneration %} "
            f"around them in data.chat_template, {last_alone}or learn contents and calls as they are "
            "written here, without thoughts (train_parts: [answers, tool_calls])"
        )

    def _end_of_last_answer(
        self, text: str, messages_before: list[dict[str, object]], variables: Json
    ) -> int:
        """Return where the answer ends with which a text ends.

        Args:
            text: of a chat up to an answer.
            messages_before: the messages before the answer.
            variables: of the template.
        """
        stripped_text = text.rstrip()
        end = self.tokenizer.eos_token or ""
        bare = stripped_text.removesuffix(end).rstrip()
        # Of two end marks the second one may be that of the chat, as Phi-3's: then the answer adds
        # none. After the mark of a call it is that of the answer.
        if bare != stripped_text and bare.endswith(self.end_marks):
            text_before = self._apply_template_or_empty(messages_before, **variables)
            is_end_of_chat = text.count(end) == text_before.count(end)
            stripped_text = bare if is_end_of_chat else stripped_text
        return len(stripped_text if stripped_text.endswith(self.end_marks) else text)

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


def _common_prefix_length(text: str, other_text: str) -> int:
    if text.startswith(other_text):
        return len(other_text)
    length = min(len(text), len(other_text))
    return next((at for at in range(length) if text[at] != other_text[at]), length)


def _without_end_marks(
    text: str, ranges: Sequence[range], end_marks: tuple[str, ...]
) -> list[range]:
    """Return ranges without the end marks in which they end, and without spaces around these."""
    return [
        item[: _length_without_end_mark(text[item.start : item.stop], end_marks)] for item in ranges
    ]


def _length_without_end_mark(answer_text: str, end_marks: tuple[str, ...]) -> int:
    stripped_text = answer_text.rstrip()
    mark = next((mark for mark in end_marks if stripped_text.endswith(mark)), "")
    return len(stripped_text.removesuffix(mark).rstrip()) if mark else len(answer_text)


def _require_fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            "data.tokenizer: does not report the positions of tokens in a text; use a fast "
            "tokenizer"
        )

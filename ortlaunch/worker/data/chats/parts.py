"""Where the thoughts, the content and the calls of an answer are in the text of a chat.

A value is located by another rendering, which has a mark in its place: the texts are alike before
and after it. What a template writes around values belongs to one of them: after thoughts to these,
before calls to these, at the begin and the end of an answer to its first and its last part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ortlaunch.worker.data.chats.calls import CALLS, calls_of_message, function_of_tool_or_call
from ortlaunch.worker.data.chats.rows import THOUGHTS, Chat
from ortlaunch.worker.data.chats.unwritten_parts import TextOfChat
from ortlaunch.worker.data.file_rows import DataError

_ANSWERS = "answers"
THOUGHTS_PART = "thoughts"
_CALLS = "tool_calls"
PARTS = {_ANSWERS, THOUGHTS_PART, _CALLS}
_MARK = "zq0qz"


class PartRange(NamedTuple):
    """A character range of an answer's text that belongs to one part of one message."""

    part: str
    message_index: int
    characters: range


def part_ranges_of_answers(
    chat: Chat,
    chat_text: str,
    text_of_chat: TextOfChat,
    answers: Sequence[range],
    thinking_indices: Collection[int],
) -> list[PartRange]:
    """Return the text of all answers in pieces, each of one part.

    Args:
        chat: the chat.
        chat_text: its text.
        text_of_chat: renders a chat.
        answers: the character ranges of answers, in order.
        thinking_indices: the messages whose thoughts count in the loss. The template may leave out
            those of other ones.

    Raises:
        DataError: parts cannot be separated.
    """
    values = sorted(
        (
            value
            for message_index, message in enumerate(chat.messages)
            if message["role"] == "assistant"
            for value in _ranges_of_answer_and_thoughts(
                chat, chat_text, text_of_chat, message_index, message_index in thinking_indices
            )
        ),
        key=lambda value: value.characters.start,
    )
    pieces = list[PartRange]()
    for answer in answers:
        inside = [value for value in values if value.characters.start in answer]
        # A passage without a value, as an end mark, belongs to the value before.
        inside = inside or [
            value._replace(characters=answer)
            for value in [v for v in values if v.characters.stop <= answer.start][-1:]
        ]
        begin = answer.start
        for value, following in zip(inside, [*inside[1:], None]):
            stop = (
                _end_before_following_value(chat, chat_text, text_of_chat, value, following)
                if following
                else answer.stop
            )
            pieces.append(value._replace(characters=range(begin, stop)))
            begin = stop
    return pieces


class RewrittenTurns(NamedTuple):
    """A chat whose earlier answers have another text as soon as further messages follow.

    Qwen3's own template, for one, then leaves out their thoughts and the marks around these.
    """

    chat: Chat
    text: str
    text_of_chat: TextOfChat

    def answer_range_or_none(self, message_index: int, prompt: str, end: int) -> range | None:
        """Return the range of an answer by its content and calls; None: it is not certain.

        Args:
            message_index: of the answer.
            prompt: the text of the messages before, with the template's request for an answer.
            end: where the answer ends in the text of the chat without further messages.
        """
        if not message_index:
            return None
        messages = self.chat.messages
        chat_before, chat_through = (
            dataclasses.replace(self.chat, messages=messages[:stop])
            for stop in (message_index, message_index + 1)
        )
        prompt_end = prompt.removeprefix(self.text_of_chat(chat_before))
        text_through = self.text_of_chat(chat_through)
        values, values_through = (
            sorted(
                _ranges_of_answer_and_thoughts(chat, text, self.text_of_chat, message_index, False),
                key=lambda value: value.characters.start,
            )
            for chat, text in ((self.chat, self.text), (chat_through, text_through))
        )
        if not values or values[-1].part == THOUGHTS_PART:
            return None
        begin = self.text.rfind(prompt_end, 0, values[0].characters.start)
        # What follows the last value is the same text, whether further messages follow or not.
        text_after = text_through[values_through[-1].characters.stop : end]
        last_stop = values[-1].characters.stop
        message_before = messages[message_index - 1]
        marked_text = _chat_text_with_replaced_message(
            self.chat, self.text_of_chat, message_index - 1,
            {**message_before, "content": message_before["content"] + _MARK},
        )  # fmt: skip
        # The prompt must follow the message before; an earlier prompt is that of another answer.
        is_certain = 0 <= marked_text.find(_MARK) <= begin and self.text.startswith(
            text_after, last_stop
        )
        answer = range(begin + len(prompt_end), last_stop + len(text_after))
        return answer if is_certain and prompt_end else None


def _ranges_of_answer_and_thoughts(
    chat: Chat, chat_text: str, text_of_chat: TextOfChat, message_index: int, is_required: bool
) -> Iterator[PartRange]:
    message = chat.messages[message_index]
    texts = [(THOUGHTS_PART, key) for key in THOUGHTS if str(message.get(key) or "").strip()]
    texts += [(_ANSWERS, "content")] if message["content"].strip() else []
    for part, key in texts:
        marked_text = _chat_text_with_replaced_message(
            chat, text_of_chat, message_index, {**message, key: _MARK}
        )
        if _MARK not in marked_text and not is_required:
            continue
        start, length_after = _mark_position(chat, marked_text, message_index)
        stop = len(chat_text) - length_after
        is_separate = (
            start <= stop
            and chat_text[:start] == marked_text[:start]
            and chat_text[stop:] == marked_text[start + len(_MARK) :]
        )
        if not is_separate:
            raise _inseparable(chat, message_index)
        yield PartRange(part, message_index, range(start, stop))
    if calls := calls_of_message(message):
        key = "tool_calls" if message.get("tool_calls") else "function_call"
        function = function_of_tool_or_call(calls[0])
        first_call = (
            {**function, "name": _MARK}
            if function is calls[0]
            else {**calls[0], "function": {**function, "name": _MARK}}
        )
        changed = [first_call, *calls[1:]] if key == "tool_calls" else first_call
        marked_text = _chat_text_with_replaced_message(
            chat, text_of_chat, message_index, {**message, key: changed}
        )
        # gpt-oss's template writes the name again, before the results of the call.
        start = marked_text.find(_MARK)
        if start < 0 or chat_text[:start] != marked_text[:start]:
            raise _inseparable(chat, message_index)
        yield PartRange(_CALLS, message_index, range(start, start + len(function["name"])))


def _end_before_following_value(
    chat: Chat, chat_text: str, text_of_chat: TextOfChat, value: PartRange, following: PartRange
) -> int:
    """Return where a part ends that another one follows.

    Raises:
        DataError: it cannot be told.
    """
    if value.part == THOUGHTS_PART and following.part == _CALLS:
        between = chat_text[value.characters.stop : following.characters.start]
        message = chat.messages[value.message_index]
        without_calls, without_thoughts = (
            _chat_text_with_replaced_message(
                chat,
                text_of_chat,
                value.message_index,
                {key: item for key, item in message.items() if key not in keys},
            )
            for keys in (CALLS, THOUGHTS)
        )
        # What the template writes before calls without thoughts, too, belongs to the calls.
        text_after_calls = chat_text[following.characters.start :]
        text_before_calls = without_thoughts.removesuffix(text_after_calls)
        opening_length = max(
            length
            for length in range(len(between) + 1)
            if text_before_calls.endswith(between[len(between) - length :])
        )
        stop = following.characters.start - opening_length
        if not without_thoughts.endswith(text_after_calls) or not without_calls.startswith(
            chat_text[:stop]
        ):
            raise _inseparable(chat, value.message_index)
        return stop
    # The end of the last call is not located.
    if value.part == _CALLS:
        raise _inseparable(chat, value.message_index)
    return following.characters.start if value.part == THOUGHTS_PART else value.characters.stop


def _chat_text_with_replaced_message(
    chat: Chat, text_of_chat: TextOfChat, message_index: int, message: dict[str, object]
) -> str:
    messages = [*chat.messages]
    messages[message_index] = message
    try:
        return text_of_chat(dataclasses.replace(chat, messages=messages))
    # Any error of the template's own code.
    except Exception:
        raise _inseparable(chat, message_index) from None


def _mark_position(chat: Chat, marked_text: str, message_index: int) -> tuple[int, int]:
    """Return the characters before the mark, and those after it."""
    if marked_text.count(_MARK) != 1:
        raise _inseparable(chat, message_index)
    start = marked_text.index(_MARK)
    return start, len(marked_text) - start - len(_MARK)


def _inseparable(chat: Chat, message_index: int) -> DataError:
    return DataError(
        f"{chat.location}: thoughts, content and calls of message {message_index + 1} cannot be told "
        "apart in the text of the chat template: learn them all (without train_parts), or use another "
        "template"
    )

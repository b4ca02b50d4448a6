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
_THOUGHTS = "thoughts"
_CALLS = "tool_calls"
PARTS = {_ANSWERS, _THOUGHTS, _CALLS}
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
    learned_indices: Collection[int],
) -> list[PartRange]:
    """Return the text of all answers in pieces, each of one part.

    Args:
        chat: the chat.
        chat_text: its text.
        text_of_chat: renders a chat.
        answers: the character ranges of answers, in order.
        learned_indices: the messages that count in the loss. The template may leave out values of
            other ones.

    Raises:
        DataError: parts cannot be separated.
    """
    values = sorted(
        (
            value
            for message_index, message in enumerate(chat.messages)
            if message["role"] == "assistant"
            for value in _ranges_of_answer_and_thoughts(
                chat, chat_text, text_of_chat, message_index, message_index in learned_indices
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


def _ranges_of_answer_and_thoughts(
    chat: Chat, chat_text: str, text_of_chat: TextOfChat, message_index: int, is_learned: bool
) -> Iterator[PartRange]:
    message = chat.messages[message_index]
    texts = [(_THOUGHTS, key) for key in THOUGHTS if str(message.get(key) or "").strip()]
    texts += [(_ANSWERS, "content")] if message["content"].strip() else []
    for part, key in texts:
        marked_text = _chat_text_with_replaced_message(
            chat, text_of_chat, message_index, {**message, key: _MARK}
        )
        if _MARK not in marked_text and not is_learned:
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
        start, _ = _mark_position(chat, marked_text, message_index)
        if chat_text[:start] != marked_text[:start]:
            raise _inseparable(chat, message_index)
        yield PartRange(_CALLS, message_index, range(start, start + len(function["name"])))


def _end_before_following_value(
    chat: Chat, chat_text: str, text_of_chat: TextOfChat, value: PartRange, following: PartRange
) -> int:
    """Return where a part ends that another one follows.

    Raises:
        DataError: it cannot be told.
    """
    if value.part == _THOUGHTS and following.part == _CALLS:
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
    return following.characters.start if value.part == _THOUGHTS else value.characters.stop


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

"""Parts of a chat that its template does not write: each is changed, and the texts are compared.

All parts get a mark of their own in one rendering. A part whose mark is missing there is changed
alone, as marks may lead a template another way.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.chats.calls import CALLS, calls_of_message, function_of_tool_or_call
from ortlaunch.worker.data.chats.rows import THOUGHTS, Chat, learned_answer_indices
from ortlaunch.worker.data.file_rows import DataError

TextOfChat = Callable[[Chat], str]
# Columns that belong to a chat. Of other columns only the audit tells.
_CHAT_COLUMNS = ("tools", "functions", "documents", "history", "system", "image", "images", "video",
                 "videos", "audio", "audios", *THOUGHTS)  # fmt: skip
# Fields of the source that give these columns to the template.
_FIELD_BY_COLUMN = {"functions": "tools_column", "system": "system_column"}
_FLAGS = ("weight", "train", "training")
# Keys of a message that only link a call with its result.
_LINKS = ("role", "content", "tool_call_id", *CALLS)
_USUAL_ROLES = {"system", "user", "assistant", "tool"}
# The usual meaning of roles in other forms of rows.
_ROLE_BY_OTHER_NAME = {"gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system",
                       "function": "tool", "observation": "tool"}  # fmt: skip
_FIRST_TAG = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\])?\s*")
_SHOWN_CHARACTERS = 40
_KEEPS_ALL = "use a template that keeps the thoughts of all answers"
_EACH_CALL_ALONE = (
    "use a template that writes several calls of a message, or write each call as a message of its own, "
    "before its result"
)


class ChatPart(NamedTuple):
    """A part of a chat that its text must depend on."""

    owner: str
    """For messages: `the row`, or a message."""
    name: str
    message_index: int
    """-1: a column of the row."""
    key: str
    change: Callable[[Any, str], Any] | None
    """A value of the key and a mark -> the value with the mark; None: the key is left out."""
    remedy: str = ""


def refuse_unwritten_parts(
    chat: Chat, chat_text: str, text_of_chat: TextOfChat, source: Corpus, template_text: str
) -> None:
    """Refuse a chat of which the template leaves a part out.

    Args:
        chat: the chat.
        chat_text: its text.
        text_of_chat: renders a chat.
        source: the source of the chat, whose fields are remedies.
        template_text: the chat template.

    Raises:
        DataError: with the parts, and remedies.
    """
    for message_index, message in enumerate(chat.messages):
        role = message["role"]
        if (
            role not in _USUAL_ROLES
            and role not in source.roles.values()
            and not re.search(f"""['"]{re.escape(role)}['"]""", template_text)
        ):
            raise DataError(
                f"{chat.location}: message {message_index + 1} has the role {role!r}, which the chat "
                f"template does not name: give the role that it stands for, as roles: {{{role}: "
                f"{_ROLE_BY_OTHER_NAME.get(role, 'user')}}}, or leave its messages out by roles: "
                f"{{{role}: null}}"
            )
    parts = [*_parts_of_chat(chat, source)]
    marks = [f"zq{part_number}qz" for part_number in range(len(parts))]
    marked_text = _text_or_none(chat, parts, marks, text_of_chat) or ""
    unwritten = [
        part
        for part, mark in zip(parts, marks)
        if mark not in marked_text
        and _text_or_none(chat, [part], [mark], text_of_chat) == chat_text
    ]
    if not unwritten:
        return
    owner = unwritten[0].owner
    parts_of_owner = [part for part in unwritten if part.owner == owner]
    # Of a call that is not written, its arguments are not either.
    names = [
        part.name
        for part in parts_of_owner
        if not any(part.name.endswith(f" of {other.name}") for other in parts_of_owner)
    ]
    # Without the calls of a message its first one is gone, too.
    keys = dict.fromkeys(
        part.key
        for part in unwritten
        if part.key != "content" and unwritten[0].remedy != _EACH_CALL_ALONE
    )
    field_text = f"leave them out by ignore_fields: [{', '.join(keys)}]"
    remedy = unwritten[0].remedy or "use the template of a model that has them"
    raise DataError(
        f"{chat.location}: {owner} has {' and '.join(names)}, and the chat template does not write them: "
        f"{remedy}{f', or {field_text}' if keys else ''}"
    )


def _parts_of_chat(chat: Chat, source: Corpus) -> Iterator[ChatPart]:
    used_columns = (source.system_column, source.prompt_column, source.response_column)
    has_system = any(message["role"] == "system" for message in chat.messages)
    for name in _CHAT_COLUMNS:
        if not chat.columns.get(name) or name in used_columns or (name == "system" and has_system):
            continue
        field = _FIELD_BY_COLUMN.get(name)
        remedy = f"give {field}: {name}" if field and not getattr(source, field) else ""
        yield ChatPart("the row", name, -1, name, None, remedy)
    learned = learned_answer_indices(chat.messages, source)
    # The thoughts of the last answer are those that a template keeps.
    keeps_all = _KEEPS_ALL + ", or train_on: last" * (len(learned) > 1)
    called_names = set[str]()
    for message_index, message in enumerate(chat.messages):
        # The thoughts of earlier answers: many templates write those of the last one alone.
        are_thoughts_needed = (
            message["role"] != "assistant"
            or source.train_on == "all"
            or message_index in (learned if "thoughts" in source.train_parts else learned[-1:])
        )
        yield from _parts_of_message_content(
            message, message_index, keeps_all if are_thoughts_needed else ""
        )
        called_names.update(
            function_of_tool_or_call(call)["name"] for call in calls_of_message(message)
        )
        for key, value in message.items():
            is_known = key in (*_LINKS, source.train_key) or (
                key == "name" and message["role"] in ("tool", "function") and value in called_names
            )
            is_empty = value in (None, "", [], {})
            if not is_empty and not is_known and (key not in THOUGHTS or are_thoughts_needed):
                change = _text_with_mark if isinstance(value, str) else None
                flag = f"give train_key: {key}" if key in _FLAGS else ""
                yield ChatPart(
                    f"message {message_index + 1}", key, message_index, key, change,
                    keeps_all if key in THOUGHTS else flag,
                )  # fmt: skip
        yield from _call_parts(message, message_index)


def _parts_of_message_content(
    message: Json, message_index: int, remedy_of_thoughts: str
) -> Iterator[ChatPart]:
    content = message["content"]
    if not content.strip():
        return
    owner = f"message {message_index + 1}"
    role = message["role"]
    name = f"a content, {content[:_SHOWN_CHARACTERS]!r}, in role {role}"
    left_out = f"its role by roles: {{{role}: null}}" if role != "assistant" else "the row"
    remedy = f"use a template that does, or leave out {left_out}"
    yield ChatPart(owner, name, message_index, "content", _text_with_mark, remedy)
    if role == "assistant" and remedy_of_thoughts:
        # Templates that look for </think> leave out what is before it.
        name = f"the begin of {name}"
        yield ChatPart(
            owner, name, message_index, "content", _text_with_mark_at_begin, remedy_of_thoughts
        )


def _call_parts(message: Json, message_index: int) -> Iterator[ChatPart]:
    owner = f"message {message_index + 1}"
    for call_index, call in enumerate(calls_of_message(message)):
        key = "tool_calls" if call_index < len(message.get("tool_calls", ())) else "function_call"
        name = f"call {call_index + 1} of {key}" if call_index else key

        def with_marked_name(calls: Any, mark: str, index: int = call_index) -> Any:
            return _calls_with_changed_function(
                calls, index, lambda function: {**function, "name": function["name"] + mark}
            )

        def with_marked_arguments(calls: Any, mark: str, index: int = call_index) -> Any:
            return _calls_with_changed_function(
                calls, index, lambda function: _function_with_argument(function, mark)
            )

        remedy = _EACH_CALL_ALONE if call_index else ""
        yield ChatPart(owner, name, message_index, key, with_marked_name, remedy)
        if function_of_tool_or_call(call).get("arguments"):
            yield ChatPart(owner, f"arguments of {name}", message_index, key, with_marked_arguments)


def _calls_with_changed_function(
    calls: Any, call_index: int, change: Callable[[Json], Json]
) -> Any:
    """Return the value of `tool_calls`, or of `function_call`, with one function changed."""
    if isinstance(calls, list):
        return [
            _calls_with_changed_function(call, 0, change) if index == call_index else call
            for index, call in enumerate(calls)
        ]
    function = function_of_tool_or_call(calls)
    return change(calls) if function is calls else {**calls, "function": change(calls["function"])}


def _function_with_argument(function: Json, mark: str) -> Json:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        changed = json.dumps({**json.loads(arguments), mark: mark}, ensure_ascii=False)
        return {**function, "arguments": changed}
    return {**function, "arguments": {**arguments, mark: mark}}


def _text_with_mark(text: str, mark: str) -> str:
    return text + mark


def _text_with_mark_at_begin(text: str, mark: str) -> str:
    """Return a text with a mark after its first tag, as <think>, which a template may look for."""
    tag = _FIRST_TAG.match(text)
    end = tag.end() if tag else 0
    return f"{text[:end]}{mark}{text[end:]}"


def _text_or_none(
    chat: Chat, parts: Sequence[ChatPart], marks: Sequence[str], text_of_chat: TextOfChat
) -> str | None:
    """Return the text of a chat with these parts changed; None: the template refuses it."""
    messages = [{**message} for message in chat.messages]
    columns = {**chat.columns}
    for part, mark in zip(parts, marks):
        owner = messages[part.message_index] if part.message_index >= 0 else columns
        if part.change:
            owner[part.key] = part.change(owner[part.key], mark)
        elif len(parts) == 1:
            del owner[part.key]
    try:
        return text_of_chat(dataclasses.replace(chat, messages=messages, columns=columns))
    # Any error of the template's own code: it looks at this part.
    except Exception:
        return None

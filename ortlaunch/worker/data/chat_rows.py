"""Chats as rows store them: messages, or a prompt and its response; and chats of built-in text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import PROMPTS
from ortlaunch.worker.data.corpus import (
    corpus_name_for_errors,
    read_corpus_rows_up_to_limit,
    read_texts_with_fraction_of_corpus_read,
    require_column_value_of_allowed_length,
)
from ortlaunch.worker.data.file_rows import DataError, Row

# Keys of a message with calls of tools: today's, and the older one.
CALLS = ("tool_calls", "function_call")
# Turns (question and answer) of a built-in chat.
_TURNS = 3


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content`; at least one is the assistant's."""

    messages: list[Json]
    location: str
    columns: Json = field(default_factory=dict)
    """The other columns of the row, such as `tools`, which a template may write."""

    def __len__(self) -> int:
        """Return the number of characters, which bounds the memory of a chunk of chats."""
        return sum(len(message["content"]) for message in self.messages)


def read_chats_with_fraction_of_corpus_read(source: str | Corpus) -> Iterator[tuple[Chat, float]]:
    """Yield chats in a fixed order, each with the share (0 to 1) of the corpus read so far.

    Raises:
        DataError: a row has no valid chat; the message gives file and line.
    """
    if isinstance(source, str):
        yield from _built_in_chats_with_fraction_of_corpus_read()
        return
    # These may be missing in some rows.
    unseen_columns = {item for item in (source.system_column, source.input_column) if item}
    for row in read_corpus_rows_up_to_limit(source):
        unseen_columns -= row.values.keys()
        messages = (
            _checked_messages_of_row(row, source)
            if source.messages_column
            else _prompt_and_response_messages(row, source)
        )
        # A prompt has the system's text within.
        system = [] if source.prompt else [*_system_message_of_row_if_any(row, source)]
        columns = {
            name: item for name, item in row.values.items() if name != source.messages_column
        }
        yield Chat([*system, *messages], row.location, columns), row.share
    if unseen_columns:
        raise DataError(
            f"{corpus_name_for_errors(source)}: no row has a column {' or '.join(sorted(unseen_columns))}"
        )


def message_contents_of_chats(source: str | Corpus) -> Iterator[str]:
    """Return the contents of all messages, to train a tokenizer on."""
    return (
        message["content"]
        for chat, _ in read_chats_with_fraction_of_corpus_read(source)
        for message in chat.messages
    )


def _system_message_of_row_if_any(row: Row, source: Corpus) -> Iterator[dict[str, object]]:
    if text := _text_of_column_or_empty(row, source.system_column):
        yield {"role": "system", "content": text}


def _text_of_column_or_empty(row: Row, column: str | None) -> str:
    text = row.values.get(column) if column else None
    if not isinstance(text, (str, type(None))):
        raise DataError(f"{row.location}: {column} is {text!r:.80}; it must be text")
    return text or ""


def _checked_messages_of_row(row: Row, source: Corpus) -> list[Json]:
    column = str(source.messages_column)
    raw_messages = require_column_value_of_allowed_length(row, column)
    if not isinstance(raw_messages, list) or not raw_messages:
        raise DataError(
            f"{row.location}: {column} is {raw_messages!r:.80}; it must be a list of messages"
        )
    checked_messages = (
        _checked_message_with_standard_keys(
            row, source, f"message {message_number} of {column}", message
        )
        for message_number, message in enumerate(raw_messages, 1)
    )
    messages = [message for message in checked_messages if message["role"] is not None]
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"{row.location}: {column} has no message of role assistant to train on; it has {roles}"
        )
    return messages


def _checked_message_with_standard_keys(
    row: Row, source: Corpus, message_name: str, message: Any
) -> Json:
    if not isinstance(message, dict):
        raise DataError(
            f"{row.location}: {message_name} is {message!r:.80}; it must have a role and a content"
        )
    names = {source.role_key: "role", source.content_key: "content"}
    message = {**message, **_content_of_joined_parts_or_empty_dict(message, source.content_key)}
    for key in names:
        if key not in message:
            raise DataError(
                f"{row.location}: {message_name} has no {key!r}; it has "
                f"{', '.join(map(str, message)) or 'nothing'}"
            )
        if not isinstance(message[key], str):
            raise DataError(
                f"{row.location}: {message_name}: {key} is {message[key]!r:.80}; it must be text"
            )
    # Parquet gives every message all keys that one message has; the absent ones are None.
    named_values = {
        str(names.get(key, key)): item for key, item in message.items() if item is not None
    }
    role = source.roles.get(named_values["role"], named_values["role"])
    is_trained_on = named_values.get(source.train_key or "")
    if is_trained_on not in (None, True, False) or (is_trained_on and role != "assistant"):
        only = "" if is_trained_on not in (True, False) else f" in a message of role {role}"
        raise DataError(
            f"{row.location}: {message_name}: {source.train_key} is {is_trained_on!r:.80}{only}; it must be true or "
            "false, and true for answers alone"
        )
    return {**named_values, "role": role}


def _content_of_joined_parts_or_empty_dict(
    message: dict[str, object], content_key: str
) -> dict[str, object]:
    """Return the content of a message as text: of its parts, or "" beside calls of tools."""
    content = message.get(content_key)
    if content is None and any(message.get(name) for name in CALLS):
        return {content_key: ""}
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return {}
    return {content_key: "".join(part["text"] for part in content)}


def _prompt_and_response_messages(row: Row, source: Corpus) -> list[dict[str, object]]:
    # With a prompt the columns have the names of Alpaca, and the input's may be absent.
    prompt, answer = (
        _require_nonempty_text(row, column)
        for column in (
            source.prompt_column or "instruction",
            source.response_column or "output",
        )
    )
    input_text = _text_of_column_or_empty(
        row, source.input_column or ("input" if source.prompt else None)
    )
    if source.prompt:
        prompt_format = PROMPTS[source.prompt] if isinstance(source.prompt, str) else source.prompt
        system = _text_of_column_or_empty(row, source.system_column)
        prompt = prompt_format.fill_template(
            {"instruction": prompt, "input": input_text, "system": system}
        )
    elif input_text:
        prompt = f"{prompt}\n{input_text}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _require_nonempty_text(row: Row, column: str) -> str:
    text = require_column_value_of_allowed_length(row, column)
    if not isinstance(text, str) or not text:
        problem = "empty; leave the row out" if text == "" else f"{text!r:.80}; it must be text"
        raise DataError(f"{row.location}: {column} is {problem}")
    return text


def _built_in_chats_with_fraction_of_corpus_read() -> Iterator[tuple[Chat, float]]:
    """Yield chats of Python's language reference: `_TURNS` paragraphs of a topic make a chat."""
    from pydoc_data.topics import topics

    for name, (text, share) in zip(
        sorted(topics), read_texts_with_fraction_of_corpus_read("python-docs")
    ):
        parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        for first_part in range(0, len(parts), _TURNS):
            questions = [
                f"What does Python's reference say about {name!r}, part {first_part + 1}?",
                *["Go on."] * (_TURNS - 1),
            ]
            turns = zip(questions, parts[first_part : first_part + _TURNS])
            messages = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in zip(("user", "assistant"), turn)
            ]
            yield Chat(messages, f"python-chats: {name}"), share

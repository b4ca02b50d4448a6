"""Chats as rows store them: messages, or a prompt and its response; and chats of built-in text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import PROMPTS
from ortlaunch.worker.data.chats.calls import (
    CALLS,
    checked_calls_by_key,
    refuse_repeated_or_unknown_call_ids,
    tools_of_cell,
    value_without_absent_keys,
)
from ortlaunch.worker.data.corpus import (
    corpus_name_for_errors,
    read_corpus_rows_up_to_limit,
    read_texts_with_fraction_of_corpus_read,
    require_column_value_of_allowed_length,
)
from ortlaunch.worker.data.file_rows import DataError, Row

# Keys of a message with the thoughts before its answer, as templates name them.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Types of the parts of a content that are text, of OpenAI's two interfaces.
_TEXT_PARTS = (None, "text", "input_text", "output_text")
# Turns (question and answer) of a built-in chat.
_TURNS = 3


# The settings of a source that has none, as of the built-in one.
DEFAULT_SOURCE = Corpus(format="jsonl", messages_column="messages")


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
    optional_columns = (source.system_column, source.input_column, source.tools_column)
    unseen_names = {*filter(None, (*optional_columns, *source.ignore_fields))}
    rows = read_corpus_rows_up_to_limit(source)
    yield from chats_of_rows_with_fraction_of_corpus_read(rows, source, unseen_names)
    if unseen_names:
        form = "column" if unseen_names.isdisjoint(source.ignore_fields) else "column or key"
        raise DataError(
            f"{corpus_name_for_errors(source)}: no row has a {form} {' or '.join(sorted(unseen_names))}"
        )


def chats_of_rows_with_fraction_of_corpus_read(
    corpus_rows: Iterable[Row], source: Corpus, unseen_names: set[str]
) -> Iterator[tuple[Chat, float]]:
    """Yield the chat of each row, and remove what rows have from the unseen names.

    Raises:
        DataError: a row has no valid chat.
    """
    for row in corpus_rows:
        unseen_names.difference_update(row.values)
        messages = (
            _checked_messages_of_row(row, source, unseen_names)
            if source.messages_column
            else _prompt_and_response_messages(row, source)
        )
        # A prompt has the system's text within.
        system = [] if source.prompt else [*_system_message_of_row_if_any(row, source)]
        yield Chat([*system, *messages], row.location, _columns_of_row(row, source)), row.share


def learned_answer_indices(messages: Sequence[Json], source: Corpus) -> list[int]:
    """Return the messages of role assistant that count in the loss, by the source's fields."""
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        index
        for index in (indices[-1:] if source.train_on == "last" else indices)
        if not source.train_key or messages[index].get(source.train_key) in (None, True)
    ]


def _columns_of_row(row: Row, source: Corpus) -> Json:
    """Return the columns that a template may write; `tools` are a list of objects."""
    columns = {
        name: item
        for name, item in row.values.items()
        if name != source.messages_column and name not in source.ignore_fields
    }
    tools = columns.pop(source.tools_column or "tools", None)
    if not tools:
        return columns
    checked_tools = tools_of_cell(tools, f"{row.location}: {source.tools_column or 'tools'}")
    return {**columns, "tools": _as_written(checked_tools, source)}


def _as_written(value: object, source: Corpus) -> Any:
    return value_without_absent_keys(value) if source.format in ("parquet", "hub") else value


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


def _checked_messages_of_row(row: Row, source: Corpus, unseen_names: set[str]) -> list[Json]:
    """Return the messages of a row, and remove their keys from `unseen_names`.

    Raises:
        DataError: the column has no messages, or a message is invalid.
    """
    column = str(source.messages_column)
    raw_messages = require_column_value_of_allowed_length(row, column)
    if not isinstance(raw_messages, list) or not raw_messages:
        raise DataError(
            f"{row.location}: {column} is {raw_messages!r:.80}; it must be a list of messages"
        )
    messages = list[Json]()
    for message_number, raw_message in enumerate(raw_messages, 1):
        message_name = f"{row.location}: message {message_number} of {column}"
        if not isinstance(raw_message, dict):
            raise DataError(
                f"{message_name} is {raw_message!r:.80}; it must have a role and a content"
            )
        if unseen_names:
            unseen_names.difference_update(
                raw_message, _part_types(raw_message.get(source.content_key))
            )
        message = _checked_message_with_standard_keys(source, message_name, raw_message)
        if message["role"] is not None:
            messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"{row.location}: {column} has no message of role assistant to train on; it has {roles}"
        )
    _refuse_empty_answers(messages, source, f"{row.location}: {column}")
    refuse_repeated_or_unknown_call_ids(messages, row.location)
    return messages


def _refuse_empty_answers(messages: Sequence[Json], source: Corpus, messages_name: str) -> None:
    if source.train_on == "all":
        return
    for index in learned_answer_indices(messages, source):
        if not messages[index]["content"].strip() and not any(
            messages[index].get(key) for key in (*CALLS, *THOUGHTS)
        ):
            raise DataError(
                f"{messages_name}: the answer of message {index + 1} is empty: its content is "
                f"{messages[index]['content']!r}, and it has no tool_calls; leave the row out, or learn "
                "other answers (train_on: last, train_key)"
            )


def _checked_message_with_standard_keys(source: Corpus, message_name: str, message: Json) -> Json:
    names = {source.role_key: "role", source.content_key: "content"}
    has_ignored_calls = any(message.get(key) for key in CALLS if key in source.ignore_fields)
    # Parquet gives every message all keys that one message has; the absent ones are None.
    message = {
        str(key): item
        for key, item in message.items()
        if (item is not None or key in names) and key not in source.ignore_fields
    }
    calls = _as_written(checked_calls_by_key(message, message_name), source)
    content = _content_as_text(message, source, message_name, bool(calls) or has_ignored_calls)
    message = {key: item for key, item in message.items() if key not in CALLS} | content | calls
    for key in names:
        if key not in message:
            raise DataError(
                f"{message_name} has no {key!r}; it has {', '.join(message) or 'nothing'}"
            )
        if not isinstance(message[key], str):
            raise DataError(
                f"{message_name}: {key} is {message[key]!r:.80}; it must be text; leave the row out"
            )
    named_values = {names.get(key, key): item for key, item in message.items()}
    role = source.roles.get(named_values["role"], named_values["role"])
    is_trained_on = named_values.get(source.train_key or "")
    if is_trained_on not in (None, True, False) or (is_trained_on and role != "assistant"):
        only = "" if is_trained_on not in (True, False) else f" in a message of role {role}"
        raise DataError(
            f"{message_name}: {source.train_key} is {is_trained_on!r:.80}{only}; it must be true or "
            "false, and true for answers alone"
        )
    return {**named_values, "role": role}


def _content_as_text(message: Json, source: Corpus, message_name: str, has_calls: bool) -> Json:
    """Return the content of a message as text, by its key: of its parts, or "" beside calls.

    Raises:
        DataError: a part is no text.
    """
    content = message.get(source.content_key)
    if content is None and (has_calls or any(message.get(key) for key in THOUGHTS)):
        return {source.content_key: ""}
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return {}
    parts = [part for part in content if part.get("type") not in source.ignore_fields]
    for part in parts:
        part_type = part.get("type")
        if part_type not in _TEXT_PARTS:
            raise DataError(
                f"{message_name}: its content has a part of type {part_type}, and the model reads text "
                f"alone: leave the row out, or the part by ignore_fields: [{part_type}]"
            )
        if not isinstance(part.get("text"), str):
            raise DataError(
                f"{message_name}: its content has a part {part!r:.80}; it must have a text"
            )
    return {source.content_key: "".join(part["text"] for part in parts)}


def _part_types(content: object) -> list[Any]:
    parts = content if isinstance(content, list) else []
    return [part.get("type") for part in parts if isinstance(part, dict)]


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

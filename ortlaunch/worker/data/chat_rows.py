"""Chats as rows store them: messages, or a prompt and its response; and chats of built-in text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.json_types import Json
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.prompts import PROMPTS
from ortlaunch.worker.data.corpus import corpus_name, documents_read, rows, value
from ortlaunch.worker.data.reading import DataError, Row

# Keys of a message with calls of tools: today's, and the older one.
CALLS = ("tool_calls", "function_call")
# Turns (question and answer) of a built-in chat.
_TURNS = 3


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content`; at least one is the assistant's."""

    messages: list[Json]
    place: str
    columns: Json = field(default_factory=dict)
    """The other columns of the row, such as `tools`, which a template may write."""

    def __len__(self) -> int:
        """Return the number of characters, which bounds the memory of a chunk of chats."""
        return sum(len(message["content"]) for message in self.messages)


def chats_read(source: str | Corpus) -> Iterator[tuple[Chat, float]]:
    """Yield chats in a fixed order, each with the share (0 to 1) of the corpus read so far.

    Raises:
        DataError: a row has no valid chat; the message gives file and line.
    """
    if isinstance(source, str):
        yield from _built_in()
        return
    # These may be missing in some rows.
    unseen = {each for each in (source.system_column, source.input_column) if each}
    for row in rows(source):
        unseen -= row.values.keys()
        messages = _messages(row, source) if source.messages_column else _pair(row, source)
        # A prompt has the system's text within.
        system = [] if source.prompt else [*_system(row, source)]
        columns = {
            name: each for name, each in row.values.items() if name != source.messages_column
        }
        yield Chat([*system, *messages], row.place, columns), row.share
    if unseen:
        raise DataError(f"{corpus_name(source)}: no row has a column {' or '.join(sorted(unseen))}")


def chat_texts(source: str | Corpus) -> Iterator[str]:
    """Return the contents of all messages, to train a tokenizer on."""
    return (message["content"] for chat, _ in chats_read(source) for message in chat.messages)


def _system(row: Row, source: Corpus) -> Iterator[Json]:
    if text := _optional(row, source.system_column):
        yield {"role": "system", "content": text}


def _optional(row: Row, column: str | None) -> str:
    found = row.values.get(column) if column else None
    if not isinstance(found, (str, type(None))):
        raise DataError(f"{row.place}: {column} is {found!r:.80}; it must be text")
    return found or ""


def _messages(row: Row, source: Corpus) -> list[Json]:
    column = str(source.messages_column)
    found = value(row, column)
    if not isinstance(found, list) or not found:
        raise DataError(f"{row.place}: {column} is {found!r:.80}; it must be a list of messages")
    read = (
        _message(row, source, f"message {number} of {column}", each)
        for number, each in enumerate(found, 1)
    )
    messages = [each for each in read if each["role"] is not None]
    if all(each["role"] != "assistant" for each in messages):
        roles = ", ".join(dict.fromkeys(each["role"] for each in messages))
        raise DataError(
            f"{row.place}: {column} has no message of role assistant to train on; it has {roles}"
        )
    return messages


def _message(row: Row, source: Corpus, name: str, message: Any) -> Json:
    if not isinstance(message, dict):
        raise DataError(
            f"{row.place}: {name} is {message!r:.80}; it must have a role and a content"
        )
    names = {source.role_key: "role", source.content_key: "content"}
    message = {**message, **_text_content(message, source.content_key)}
    for key in names:
        if key not in message:
            raise DataError(
                f"{row.place}: {name} has no {key!r}; it has "
                f"{', '.join(map(str, message)) or 'nothing'}"
            )
        if not isinstance(message[key], str):
            raise DataError(f"{row.place}: {name}: {key} is {message[key]!r:.80}; it must be text")
    # Parquet gives every message all keys that one message has; the absent ones are None.
    read = {str(names.get(key, key)): each for key, each in message.items() if each is not None}
    role = source.roles.get(read["role"], read["role"])
    counts = read.get(source.train_key or "")
    if counts not in (None, True, False) or (counts and role != "assistant"):
        only = "" if counts not in (True, False) else f" in a message of role {role}"
        raise DataError(
            f"{row.place}: {name}: {source.train_key} is {counts!r:.80}{only}; it must be true or "
            "false, and true for answers alone"
        )
    return {**read, "role": role}


def _text_content(message: Json, key: str) -> Json:
    """Return the content of a message as text: of its parts, or "" beside calls of tools."""
    content = message.get(key)
    if content is None and any(message.get(name) for name in CALLS):
        return {key: ""}
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return {}
    return {key: "".join(part["text"] for part in content)}


def _pair(row: Row, source: Corpus) -> list[Json]:
    # With a prompt the columns have the names of Alpaca, and the input's may be absent.
    asked, answer = (
        _text(row, column)
        for column in (
            source.prompt_column or "instruction",
            source.response_column or "output",
        )
    )
    extra = _optional(row, source.input_column or ("input" if source.prompt else None))
    if source.prompt:
        form = PROMPTS[source.prompt] if isinstance(source.prompt, str) else source.prompt
        system = _optional(row, source.system_column)
        asked = form.text({"instruction": asked, "input": extra, "system": system})
    elif extra:
        asked = f"{asked}\n{extra}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _text(row: Row, column: str) -> str:
    found = value(row, column)
    if not isinstance(found, str) or not found:
        what = "empty; leave the row out" if found == "" else f"{found!r:.80}; it must be text"
        raise DataError(f"{row.place}: {column} is {what}")
    return found


def _built_in() -> Iterator[tuple[Chat, float]]:
    """Yield chats of Python's language reference: `_TURNS` paragraphs of a topic make a chat."""
    from pydoc_data.topics import topics

    for name, (text, share) in zip(sorted(topics), documents_read("python-docs")):
        parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        for first in range(0, len(parts), _TURNS):
            asked = [
                f"What does Python's reference say about {name!r}, part {first + 1}?",
                *["Go on."] * (_TURNS - 1),
            ]
            turns = zip(asked, parts[first : first + _TURNS])
            messages = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in zip(("user", "assistant"), turn)
            ]
            yield Chat(messages, f"python-chats: {name}"), share

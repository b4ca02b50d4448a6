"""Tools of a chat and calls of them, as OpenAI and transformers write them: forms and faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ortlaunch.base.json_types import Json, parse_json_or_raise_decode_error
from ortlaunch.worker.data.file_rows import DataError

# Keys of a message with calls of tools: today's, and the older one.
CALLS = ("tool_calls", "function_call")


def tools_of_cell(cell: object, cell_name: str) -> list[Json]:
    """Return the tools of a row; the cell may be their JSON, as their forms differ from row to row.

    Raises:
        DataError: it is no list of descriptions, or two have one name.
    """
    tools = _parsed_text_or_value(cell, cell_name)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{cell_name} is {cell!r:.80}; it must be a list of tools, or its JSON")
    names = [function_of_tool_or_call(tool).get("name") for tool in tools]
    if repeated_names := [name for name in names if name and names.count(name) > 1]:
        raise DataError(
            f"{cell_name} has two tools named {repeated_names[0]!r}: rename one, or leave it out"
        )
    return tools


def function_of_tool_or_call(tool_or_call: Json) -> Json:
    """Return the name, and description or arguments, which OpenAI writes within `function`."""
    function = tool_or_call.get("function")
    return function if isinstance(function, dict) else tool_or_call


def calls_of_message(message: Json) -> list[Json]:
    """Return the calls of a message that has been checked."""
    older_call = message.get("function_call")
    return [*message.get("tool_calls", ()), *([older_call] if older_call else ())]


def checked_calls_by_key(message: Json, message_name: str) -> Json:
    """Return the keys of a message with calls; empty ones are left out.

    Raises:
        DataError: a call has another form, or arguments that are cut off.
    """
    calls_by_key = {
        key: _parsed_text_or_value(message[key], f"{message_name}: {key}")
        for key in CALLS
        if message.get(key)
    }
    for key, calls in calls_by_key.items():
        for call in calls if key == "tool_calls" and isinstance(calls, list) else [calls]:
            function = function_of_tool_or_call(call) if isinstance(call, dict) else {}
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise DataError(
                    f"{message_name}: {key} is {calls!r:.80}; a call must have a name, as "
                    '{"type": "function", "function": {"name": "weather", "arguments": {}}}'
                )
            _require_call_arguments_are_object(function, message_name)
    return calls_by_key


def _require_call_arguments_are_object(function: Json, message_name: str) -> None:
    arguments: Any = function.get("arguments") or {}
    name = f"{message_name}: the arguments of its call of {function['name']}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        reason = "are cut off" if error.pos >= len(arguments.rstrip()) - 1 else "are no JSON"
        reason = "are cut off" if error.msg.startswith("Unterminated") else reason
        raise DataError(
            f"{name} {reason} ({error.msg}), {arguments[-40:]!r}: complete them, or leave the row out"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{name} are {value!r:.80}; they must be an object, or its JSON")


def refuse_repeated_or_unknown_call_ids(messages: Sequence[Json], location: str) -> None:
    """Refuse two calls of a message with one id, and a result of a call that nobody made.

    Raises:
        DataError: with the id.
    """
    known_ids = set[str]()
    for message_number, message in enumerate(messages, 1):
        ids = [str(call["id"]) for call in calls_of_message(message) if call.get("id")]
        name = f"{location}: message {message_number}"
        if repeated_ids := [call_id for call_id in ids if ids.count(call_id) > 1]:
            raise DataError(
                f"{name} has two calls with the id {repeated_ids[0]!r}: give each its own"
            )
        known_ids.update(ids)
        result_id = message.get("tool_call_id")
        if result_id and known_ids and result_id not in known_ids:
            raise DataError(
                f"{name} is the result of a call with the id {result_id!r}, and no message before has "
                "such a call: correct the id, or leave the message out"
            )


def messages_with_arguments_in_other_form(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with arguments of calls as objects where they are JSON, or as JSON."""
    return [
        {**message, **{key: _in_other_form(message[key]) for key in CALLS if key in message}}
        for message in messages
    ]


def _in_other_form(calls: object) -> object:
    if isinstance(calls, list):
        return [_in_other_form(call) for call in calls]
    if not isinstance(calls, dict):
        return calls
    if isinstance(calls.get("function"), dict):
        return {**calls, "function": _in_other_form(calls["function"])}
    arguments: Any = calls.get("arguments") or {}
    is_text = isinstance(arguments, str)
    other = json.loads(arguments) if is_text else json.dumps(arguments, ensure_ascii=False)
    return {**calls, "arguments": other}


def json_in_json_of_arguments(messages: Sequence[Json]) -> Iterator[str]:
    """Yield arguments that are JSON as a text within JSON, as a template may write them in error."""
    for message in messages:
        for call in calls_of_message(message):
            arguments = function_of_tool_or_call(call).get("arguments")
            if isinstance(arguments, str):
                yield json.dumps(arguments, ensure_ascii=False)


def value_without_absent_keys(value: object) -> object:
    """Return a value without keys that are null, at any depth.

    Parquet gives all objects of a column the keys that one of them has.
    """
    if isinstance(value, dict):
        return {
            key: value_without_absent_keys(item) for key, item in value.items() if item is not None
        }
    return [*map(value_without_absent_keys, value)] if isinstance(value, list) else value


def _parsed_text_or_value(cell: object, cell_name: str) -> object:
    if not isinstance(cell, str):
        return cell
    try:
        return parse_json_or_raise_decode_error(cell)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{cell_name} is {cell!r:.80}, which is no JSON: {error.msg}; it must be a list, or its JSON"
        ) from None

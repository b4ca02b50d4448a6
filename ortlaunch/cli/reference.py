"""Make docs/reference/cli.md: every verb with its arguments, options and JSON output."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ortlaunch.api.json_outputs import TYPE_BY_VERB, output_json_schema

_HEAD = """\
# The command line

Made by `ortlaunch schema --commands > docs/reference/cli.md`; a test holds it to the code. Errors of the input end
with status 2 and are printed all at once; a run's own status is [its end](../concepts/ends.md).

`--json` prints one JSON value; `ortlaunch schema --output VERB` prints its JSON schema, whose fields are listed here.
`plan --json` is `plan.json`, `evaluate --json` the metrics of `evaluation.json`, `data show --json` the audit, all in
[the run folder](run-folder.md). `sweep export` prints the trials as JSON.
"""


# An argument or option that so many verbs share is described once, at the top.
_SHARED_BY = 3


def command_line_manual_page_markdown(root_command: Any) -> str:
    """Return the whole page of a command with its verbs."""
    commands = dict(_commands_by_verb("", root_command))
    counts = Counter(
        _manual_line(parameter) for command in commands.values() for parameter in command.params
    )
    shared_lines = [line for line, count in counts.items() if count >= _SHARED_BY]
    verbs = [
        line
        for verb, command in commands.items()
        for line in _verb_lines(verb, command, shared_lines)
    ]
    return "\n".join([_HEAD, "## Shared by several verbs\n", *sorted(shared_lines), "", *verbs])


def _commands_by_verb(verb: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield verb, command
        return
    for name, sub_command in command.commands.items():
        yield from _commands_by_verb(f"{verb} {name}".strip(), sub_command)


def _verb_lines(verb: str, command: Any, shared_lines: list[str]) -> Iterator[str]:
    parameters = [
        parameter for parameter in command.params if not getattr(parameter, "hidden", False)
    ]
    arguments = [
        _typed_form(parameter)
        for parameter in parameters
        if parameter.param_type_name == "argument"
    ]
    yield f"## `{' '.join(['ortlaunch', verb, *arguments])}`\n"
    yield re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip()) + "\n"
    lines = list(dict.fromkeys(map(_manual_line, parameters)))
    own_lines = [line for line in lines if line not in shared_lines]
    if own_lines:
        yield "\n".join(own_lines) + "\n"
    shared_options = [
        f"`{parameter.opts[0]}`"
        for parameter in parameters
        if _manual_line(parameter) in shared_lines and parameter.param_type_name == "option"
    ]
    if shared_options:
        yield f"Also {', '.join(shared_options)}.\n"
    for output in (verb, f"{verb} --fit"):
        if output in TYPE_BY_VERB:
            yield _output_text(output, output.removeprefix(verb).strip()) + "\n"


def _manual_line(parameter: Any) -> str:
    return f"- `{_typed_form(parameter)}`: {parameter.help}"


def _typed_form(parameter: Any) -> str:
    """Return a parameter as it is typed."""
    metavar = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        is_bare = parameter.required or metavar.startswith("[")
        return metavar if is_bare else f"[{metavar}]"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {metavar}"


def _output_text(verb: str, option: str) -> str:
    """Return the fields of a verb's JSON as one sentence, perhaps with an option of the verb."""
    schema = output_json_schema(verb)
    is_list = schema.get("type") == "array"
    item = schema["items"] if is_list else schema
    type_name = item.get("$ref", "").rpartition("/")[2]
    fields = schema.get("$defs", {}).get(type_name, item).get("properties", {})
    if verb == "list":
        return "`--json`: a list; each item is that of `status --json`."
    if not fields:
        return "`--json`: a list of the lines."
    lines = [
        f"- `{name}`: {' '.join(field.get('description', '').split())}"
        for name, field in fields.items()
    ]
    return "\n".join(
        [
            f"`{f'{option} --json'.strip()}`: {'a list; each item' if is_list else 'an object; it'} "
            "has\n",
            *lines,
        ]
    )

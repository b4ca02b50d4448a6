"""Make docs/recipe.md: each field's type, bounds, default and text, in the recipe's order.

Made from the JSON schema, so it has the texts that editors show. The schema is still unsorted,
which keeps the recipe's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ortlaunch.recipe.manual.schema import document

_HEAD = """\
# The recipe, field by field

Made by `ortlaunch schema --markdown > docs/recipe.md`; a test holds it to the code. The JSON schema has the same texts
(`ortlaunch schema`), and editors show them while you type.

A recipe is a YAML file. Any field can be set on the command line by its dotted path: `train.max_steps=50`,
`engine.name=eager`, `zero.stage=1`. What must be given is **required**, in a file that extends no other.
"""
# JSON schema's types -> the words of the page.
_WORDS = {
    "string": "text",
    "object": "mapping",
    "boolean": "true, false",
    "array": "list",
    "null": "null",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def markdown() -> str:
    """Return the whole page."""
    whole = document()
    # Fields of the same section model, as `data.train` and `data.evaluation`, share one chapter.
    sections: dict[str, list[str]] = {}
    for path, name in _sections(whole, whole, ""):
        sections.setdefault(name, []).append(path)
    parts = [_HEAD, *_table(whole, whole, sections)]
    for name, paths in sections.items():
        section = whole["$defs"][name]
        heading = ", ".join(f"`{path}`" for path in paths)
        # The tables link to this anchor, because a heading may have several paths.
        parts += ["", f'<a id="{name}"></a>', "", f"## {heading}", "", section["description"], ""]
        parts += _table(whole, section, sections)
    return "\n".join(parts) + "\n"


def _sections(
    whole: dict[str, Any], place: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, name in $defs) of each section, depth first."""
    for field, schema in place["properties"].items():
        for name, mark in _references(schema):
            yield f"{prefix}{field}{mark}", name
            yield from _sections(whole, whole["$defs"][name], f"{prefix}{field}{mark}.")


def _references(schema: dict[str, Any], mark: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name in $defs, mark) for each section of a field.

    The mark is `[]` in a list, `.*` in a mapping with the user's keys, else "".
    """
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2], mark
    for branch in _branches(schema):
        yield from _references(branch, mark)
    for inside, sign in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(inside), dict):
            yield from _references(schema[inside], sign)


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _table(
    whole: dict[str, Any], section: dict[str, Any], sections: dict[str, list[str]]
) -> list[str]:
    required = section.get("required", ())
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for field, schema in section["properties"].items():
        default = "**required**" if field in required else _default(schema)
        # A field that holds a section may have no text. Then the section's docstring is used.
        own = [schema, *(whole["$defs"][name] for name, _ in _references(schema))]
        manual = next(each["description"] for each in own if "description" in each)
        value = _cell(_kind(schema, sections))
        lines.append(f"| `{field}` | {value} | {default} | {_cell(manual)} |")
    return lines


def _cell(text: str) -> str:
    # A line end or a bar, within backticks too, would end the cell.
    return " ".join(text.split()).replace("|", "\\|")


def _default(schema: dict[str, Any]) -> str:
    # A section's default follows from its fields, which have rows of their own.
    if "default" not in schema or "$ref" in schema:
        return ""
    value = schema["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _kind(schema: dict[str, Any], sections: dict[str, list[str]]) -> str:
    """Return the accepted values in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{sections[name][0]}](#{name})"
    if _branches(schema):
        return " or ".join(_kind(branch, sections) for branch in _branches(schema))
    # pydantic writes a Literal of one name as `const`.
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    # A pair, as `betas`.
    if "prefixItems" in schema:
        return f"[{', '.join(_kind(item, sections) for item in schema['prefixItems'])}]"
    bounds = [f"{sign} {_plain(schema[name])}" for name, sign in _BOUNDS.items() if name in schema]
    bounds += [f"`{schema['pattern']}`"] if "pattern" in schema else []
    inside = schema.get("items") or schema.get("additionalProperties")
    of = f" of {_kind(inside, sections)}" if isinstance(inside, dict) else ""
    return " ".join([_WORDS.get(schema["type"], schema["type"]) + of, *bounds])


def _plain(bound: float) -> str:
    return f"{int(bound) if bound == int(bound) else bound:,}"

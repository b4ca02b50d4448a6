"""Make docs/reference/recipe.md: each field's type, bounds, default and text, in the recipe's order.

Made from the JSON schema, so it has the texts that editors show. The schema is still unsorted,
which keeps the recipe's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypedDict, cast

from ortlaunch.recipe.manual.schema import recipe_schema_with_descriptions

_HEAD = """\
# The recipe, field by field

Made by `ortlaunch schema --markdown > docs/reference/recipe.md`; a test holds it to the code. The JSON schema has the
same texts (`ortlaunch schema`), and editors show them while you type.

A recipe is a YAML file. Any field can be set on the command line by its dotted path: `train.max_steps=50`,
`engine.name=eager`, `zero.stage=1`. What must be given is **required**, in a file that extends no other.
"""
# JSON schema's types -> the words of the page.
_TYPE_WORDS = {
    "string": "text",
    "object": "mapping",
    "boolean": "true, false",
    "array": "list",
    "null": "null",
}
# The keys of pydantic's JSON schema that the page has, of the recipe, a section, a field or a part of one.
FieldSchema = TypedDict("FieldSchema", {
    "$defs": "dict[str, FieldSchema]", "$ref": str, "properties": "dict[str, FieldSchema]", "required": list[str],
    "anyOf": "list[FieldSchema]", "oneOf": "list[FieldSchema]", "prefixItems": "list[FieldSchema]",
    "items": "FieldSchema", "additionalProperties": "FieldSchema | bool",
    "type": str, "description": str, "default": object, "const": object, "enum": list[object], "pattern": str,
    "minimum": float, "exclusiveMinimum": float, "maximum": float, "exclusiveMaximum": float,
}, total=False)  # fmt: skip


def recipe_manual_page_markdown() -> str:
    """Return the whole page."""
    schema = cast(FieldSchema, recipe_schema_with_descriptions())
    # Fields of the same section model, as `data.train` and `data.evaluation`, share one chapter.
    sections: dict[str, list[str]] = {}
    for path, section_name in _path_and_section_name_pairs(schema, schema, ""):
        sections.setdefault(section_name, []).append(path)
    lines = [_HEAD, *_field_table_lines(schema, schema, sections)]
    for section_name, paths in sections.items():
        section_schema = schema["$defs"][section_name]
        heading = ", ".join(f"`{path}`" for path in paths)
        # The tables link to this anchor, because a heading may have several paths.
        lines += [
            "",
            f'<a id="{section_name}"></a>',
            "",
            f"## {heading}",
            "",
            section_schema["description"],
            "",
        ]
        lines += _field_table_lines(schema, section_schema, sections)
    return "\n".join(lines) + "\n"


def _path_and_section_name_pairs(
    schema: FieldSchema, section_schema: FieldSchema, path_prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, name in $defs) of each section, depth first."""
    for field, field_schema in section_schema["properties"].items():
        for section_name, path_mark in _section_name_and_path_mark_pairs(field_schema):
            yield f"{path_prefix}{field}{path_mark}", section_name
            yield from _path_and_section_name_pairs(
                schema, schema["$defs"][section_name], f"{path_prefix}{field}{path_mark}."
            )


def _section_name_and_path_mark_pairs(
    field_schema: FieldSchema, path_mark: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (name in $defs, mark) for each section of a field.

    The mark is `[]` in a list, `.*` in a mapping with the user's keys, else "".
    """
    if "$ref" in field_schema:
        yield field_schema["$ref"].rpartition("/")[2], path_mark
    for branch in _union_branches(field_schema):
        yield from _section_name_and_path_mark_pairs(branch, path_mark)
    for inner_schema, inner_mark in (
        (field_schema.get("items"), "[]"),
        (field_schema.get("additionalProperties"), ".*"),
    ):
        if isinstance(inner_schema, dict):
            yield from _section_name_and_path_mark_pairs(inner_schema, inner_mark)


def _union_branches(field_schema: FieldSchema) -> list[FieldSchema]:
    return [*field_schema.get("anyOf", ()), *field_schema.get("oneOf", ())]


def _field_table_lines(
    schema: FieldSchema, section_schema: FieldSchema, paths_by_section: dict[str, list[str]]
) -> list[str]:
    required = section_schema.get("required", ())
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for field, field_schema in section_schema["properties"].items():
        default = "**required**" if field in required else _default_text(field_schema)
        # A field that holds a section may have no text. Then the section's docstring is used.
        candidate_schemas = [
            field_schema,
            *(
                schema["$defs"][section_name]
                for section_name, _ in _section_name_and_path_mark_pairs(field_schema)
            ),
        ]
        manual = next(
            candidate["description"]
            for candidate in candidate_schemas
            if "description" in candidate
        )
        value = _table_cell(_accepted_values_in_words(field_schema, paths_by_section))
        lines.append(f"| `{field}` | {value} | {default} | {_table_cell(manual)} |")
    return lines


def _table_cell(text: str) -> str:
    # A line end or a bar, within backticks too, would end the cell.
    return " ".join(text.split()).replace("|", "\\|")


def _default_text(field_schema: FieldSchema) -> str:
    # A section's default follows from its fields, which have rows of their own.
    if "default" not in field_schema or "$ref" in field_schema:
        return ""
    value = field_schema["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _accepted_values_in_words(
    field_schema: FieldSchema, paths_by_section: dict[str, list[str]]
) -> str:
    if "$ref" in field_schema:
        section_name = field_schema["$ref"].rpartition("/")[2]
        return f"[{paths_by_section[section_name][0]}](#{section_name})"
    if _union_branches(field_schema):
        return " or ".join(
            _accepted_values_in_words(branch, paths_by_section)
            for branch in _union_branches(field_schema)
        )
    # pydantic writes a Literal of one name as `const`.
    if "const" in field_schema or "enum" in field_schema:
        return ", ".join(
            f"`{word}`" for word in field_schema.get("enum", [field_schema.get("const")])
        )
    # A pair, as `betas`.
    if "prefixItems" in field_schema:
        items = field_schema["prefixItems"]
        return f"[{', '.join(_accepted_values_in_words(item, paths_by_section) for item in items)}]"
    bounds = [
        *(
            f"{bound_sign} {_number_text(bound)}"
            for bound_sign, bound in (
                ("≥", field_schema.get("minimum")),
                (">", field_schema.get("exclusiveMinimum")),
                ("≤", field_schema.get("maximum")),
                ("<", field_schema.get("exclusiveMaximum")),
            )
            if bound is not None
        ),
        *([f"`{field_schema['pattern']}`"] if "pattern" in field_schema else []),
    ]
    inner_schema = field_schema.get("items") or field_schema.get("additionalProperties")
    inner_text = (
        f" of {_accepted_values_in_words(inner_schema, paths_by_section)}"
        if isinstance(inner_schema, dict)
        else ""
    )
    return " ".join(
        [_TYPE_WORDS.get(field_schema["type"], field_schema["type"]) + inner_text, *bounds]
    )


def _number_text(number: float) -> str:
    return f"{int(number) if number == int(number) else number:,}"

"""The recipe's JSON schema for editors: names, types, defaults and the manual of every field."""

from __future__ import annotations

import json
from typing import Any

from ortlaunch.recipe.fields.field_lookup import docstring_by_section_and_field
from ortlaunch.recipe.fields.recipe import Recipe

# `extends` is read before validation, and so it is no field of the model.
_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "title": "Extends",
    "description": "Another recipe, relative to this file: this one is merged over it, key by key; lists "
    "are replaced. "
    "Keys beside it that begin with `x-` or `.` are ignored: a place for YAML anchors.",
}

_NULL = {"type": "null"}


def editor_schema_json_text() -> str:
    """Return the schema as JSON text with sorted keys.

    A file that extends another one gives only the differences. JSON schema cannot see the other
    file. Therefore `required` applies at the top to files that extend nothing, and never in the
    sections; `ortlaunch validate` is the full check.
    """
    schema = recipe_schema_with_descriptions()
    for section_schema in (schema, *schema["$defs"].values()):
        section_schema["properties"] = {
            name: _field_schema_accepting_null(field_schema)
            for name, field_schema in section_schema["properties"].items()
        }
    for section_schema in schema["$defs"].values():
        section_schema.pop("required", None)
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return json.dumps(_schema_without_open_properties(schema), indent=2, sort_keys=True) + "\n"


def recipe_schema_with_descriptions() -> dict[str, Any]:
    """Return the schema in the recipe's order, with the required keys of each section."""
    schema = Recipe.model_json_schema()
    for (section_name, name), text in docstring_by_section_and_field().items():
        # pydantic has the top model's fields at the top, and all others in $defs.
        section_schema = schema if section_name == "Recipe" else schema["$defs"][section_name]
        section_schema["properties"][name]["description"] = text
    return {
        **schema,
        "patternProperties": {r"^(x-|\.)": {"description": "Ignored: a place for YAML anchors."}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ortlaunch recipe",
        "properties": {"extends": _EXTENDS, **schema["properties"]},
    }


def _field_schema_accepting_null(field_schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema that also accepts null for the default, as the loader does."""
    # A required key accepts no null.
    if "default" not in field_schema:
        return field_schema
    union_key = next(
        (union_key for union_key in ("anyOf", "oneOf") if union_key in field_schema), None
    )
    if union_key:
        return {
            **field_schema,
            union_key: [
                *field_schema[union_key],
                *([] if _NULL in field_schema[union_key] else [_NULL]),
            ],
        }
    if "$ref" in field_schema:
        return {
            "anyOf": [{"$ref": field_schema["$ref"]}, _NULL],
            **{key: field_schema[key] for key in field_schema if key != "$ref"},
        }
    # A schema with both `type` and `enum` accepts only values that match both.
    enum_with_null = {"enum": [*field_schema["enum"], None]} if "enum" in field_schema else {}
    return {**field_schema, "type": [field_schema["type"], "null"], **enum_with_null}


def _schema_without_open_properties(value: Any) -> Any:
    """Return the value without `additionalProperties: true`.

    It means nothing, and only newer versions of pydantic write it: the result would depend on the
    version.
    """
    if isinstance(value, list):
        return [_schema_without_open_properties(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _schema_without_open_properties(item)
        for key, item in value.items()
        if not (key == "additionalProperties" and item is True)
    }

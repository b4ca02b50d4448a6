"""The recipe's JSON schema for editors: names, types, defaults and the manual of every field."""

from __future__ import annotations

import json
from typing import Any

from ortlaunch.recipe.fields.field_lookup import manual
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


def json_schema() -> str:
    """Return the schema as JSON text with sorted keys.

    A file that extends another one gives only the differences. JSON schema cannot see the other
    file. Therefore `required` applies at the top to files that extend nothing, and never in the
    sections; `ortlaunch validate` is the full check.
    """
    whole = document()
    for section in (whole, *whole["$defs"].values()):
        section["properties"] = {
            name: _or_null(field) for name, field in section["properties"].items()
        }
    for section in whole["$defs"].values():
        section.pop("required", None)
    whole["anyOf"] = [{"required": ["extends"]}, {"required": whole.pop("required")}]
    return json.dumps(_tidy(whole), indent=2, sort_keys=True) + "\n"


def document() -> dict[str, Any]:
    """Return the schema in the recipe's order, with the required keys of each section."""
    schema = Recipe.model_json_schema()
    for (section, name), text in manual().items():
        # pydantic has the top model's fields at the top, and all others in $defs.
        place = schema if section == "Recipe" else schema["$defs"][section]
        place["properties"][name]["description"] = text
    return {
        **schema,
        "patternProperties": {r"^(x-|\.)": {"description": "Ignored: a place for YAML anchors."}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ortlaunch recipe",
        "properties": {"extends": _EXTENDS, **schema["properties"]},
    }


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema that also accepts null for the default, as the loader does."""
    # A required key accepts no null.
    if "default" not in field:
        return field
    kinds = next((kinds for kinds in ("anyOf", "oneOf") if kinds in field), None)
    if kinds:
        return {**field, kinds: [*field[kinds], *([] if _NULL in field[kinds] else [_NULL])]}
    if "$ref" in field:
        return {
            "anyOf": [{"$ref": field["$ref"]}, _NULL],
            **{key: field[key] for key in field if key != "$ref"},
        }
    # A schema with both `type` and `enum` accepts only values that match both.
    words = {"enum": [*field["enum"], None]} if "enum" in field else {}
    return {**field, "type": [field["type"], "null"], **words}


def _tidy(value: Any) -> Any:
    """Return the value without `additionalProperties: true`.

    It means nothing, and only newer versions of pydantic write it: the result would depend on the
    version.
    """
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _tidy(item)
        for key, item in value.items()
        if not (key == "additionalProperties" and item is True)
    }

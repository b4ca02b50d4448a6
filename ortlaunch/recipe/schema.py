"""The recipe's JSON schema, for editors: names, kinds, defaults and the manual of every field."""

from __future__ import annotations

import json
from typing import Any

from ortlaunch.recipe.fields import manual
from ortlaunch.recipe.models import Recipe

_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "title": "Extends",
    "description": "Another recipe, relative to this file: this one is merged over it, key by key; lists are replaced.",
}


def json_schema() -> str:
    """JSON text with sorted keys.

    A file that extends another one gives only what differs. JSON schema cannot see the other file, so `required` holds
    at the top for files that extend nothing, and in the sections not at all; `ortlaunch validate` is the full check.
    """
    whole = document()
    for section in whole["$defs"].values():
        section.pop("required", None)
    whole["anyOf"] = [{"required": ["extends"]}, {"required": whole.pop("required")}]
    return json.dumps(_tidy(whole), indent=2, sort_keys=True) + "\n"


def document() -> dict[str, Any]:
    """The schema in the recipe's order, with what each section requires."""
    schema = Recipe.model_json_schema()
    for (section, name), text in manual().items():
        place = schema if section == "Recipe" else schema["$defs"][section]
        place["properties"][name]["description"] = text
    return {
        **schema,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ortlaunch recipe",
        "properties": {"extends": _EXTENDS, **schema["properties"]},
    }


def _tidy(value: Any) -> Any:
    """Without `additionalProperties: true`, which says nothing and only newer versions of pydantic write."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _tidy(item) for key, item in value.items() if not (key == "additionalProperties" and item is True)}

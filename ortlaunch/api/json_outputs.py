"""Outputs of verbs with `--json`: the records that are of no file, and the schema of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ortlaunch.base.errors import InputError
from ortlaunch.doctor.finding import Finding
from ortlaunch.planning.fitting import FittingWorld
from ortlaunch.resolve.catalog import ShippedRecipe
from ortlaunch.started_runs.diagnosis import Diagnosis
from ortlaunch.started_runs.status import Status


@dataclass(frozen=True)
class RecipeCheck:
    """The output of `validate --json`; the exit status is 0 if the recipe is valid, else 2."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    recipe: str
    """The file."""
    valid: bool
    """Whether a training can start from it."""
    problems: tuple[str, ...] = ()
    """Every error, as `file:line:column: key: problem; remedy`."""
    notes: tuple[str, ...] = ()
    """Possible mistakes."""


@dataclass(frozen=True)
class LauncherRank:
    """The output of `ranks --json`."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    launcher: str | None
    """The launcher whose variables are used; null: there are none, and this is rank 0 of 1."""
    rank: int
    """From 0."""
    world_size: int
    """Ranks on all hosts."""
    local_rank: int
    """From 0 on this host."""
    local_world_size: int
    """Ranks on this host."""


TYPE_BY_VERB: dict[str, Any] = {
    "validate": RecipeCheck,
    "list": list[Status],
    "status": Status,
    "compare": list[str],
    "diagnose": Diagnosis,
    "doctor": list[Finding],
    "ranks": LauncherRank,
    "plan --fit": list[FittingWorld],
    "recipes list": list[ShippedRecipe],
}
"""The outputs that are not contents of a run folder's file."""


def output_json_schema_text(verb: str) -> str:
    """Return the JSON schema of what a verb prints with `--json`.

    Args:
        verb: as typed, such as "recipes list".

    Raises:
        InputError: the verb has no such output, or it is a file's contents.
    """
    if verb not in TYPE_BY_VERB:
        raise InputError(f"--output: got {verb!r}; one of {', '.join(TYPE_BY_VERB)}")
    schema = output_json_schema(verb)
    return json.dumps(schema, indent=2) + "\n"


def output_json_schema(verb: str) -> dict[str, Any]:
    """Return the schema of a verb of `TYPE_BY_VERB` as values."""
    schema_head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ortlaunch {verb} --json",
    }
    types = TypeAdapter(TYPE_BY_VERB[verb]).json_schema(mode="serialization")
    return {**types, **schema_head}

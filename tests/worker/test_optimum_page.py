"""docs/ortmodule/optimum.md names every argument of transformers' Trainer, and existing recipe keys."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from transformers import TrainingArguments

from ortlaunch.importers.renamed_keys import is_recipe_key
from ortlaunch.recipe.fields.field_lookup import keys_accepted_by_section

PAGE = (Path(__file__).parents[2] / "docs/ortmodule/optimum.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]


def test_every_argument_has_a_row() -> None:
    """Every argument of the installed transformers has a row; older names may have one, too."""
    named = {name for row in ROWS for name in re.findall(r"`(\w+)", row[0])}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} - named == set()


def test_the_keys_are_the_recipes() -> None:
    """Each dotted name in the second column that begins with a section is a key of recipes."""
    said = {name for row in ROWS for name in re.findall(r"`([a-z_]+\.[a-z_.]+)", row[1])}
    keys = {name for name in said if name.split(".")[0] in keys_accepted_by_section(())}
    # Guards against a pattern that matches nothing.
    assert len(keys) > 30
    assert {name for name in keys if not is_recipe_key(name)} == set()

"""Rules of the section `checkpoint`: fields that do nothing without another one."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.text.source_location import Problem


def checkpoint_retention_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of fields without effect."""
    if recipe.checkpoint.keep is None and recipe.checkpoint.keep_every is not None:
        yield (
            ("checkpoint.keep_every", "checkpoint.keep"),
            "has no effect beside keep: null, which keeps all; set only one",
        )

"""Rules of the section `checkpoint`: fields that do nothing without another one."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.models import Checkpoint, Recipe
from ortlaunch.recipe.place import Problem


def checkpoint_rules(recipe: Recipe) -> Iterator[Problem]:
    """What is given and would do nothing."""
    given, limit = recipe.checkpoint, Checkpoint.model_fields["on_complete_minutes"].default
    if given.on_complete is None and given.on_complete_minutes != limit:
        yield ("checkpoint.on_complete_minutes",), "does nothing without checkpoint.on_complete; leave it out"
    if given.keep is None and given.keep_every is not None:
        yield ("checkpoint.keep_every", "checkpoint.keep"), "does nothing beside keep: null, which keeps all; keep one"

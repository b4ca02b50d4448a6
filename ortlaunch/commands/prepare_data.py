"""`ortlaunch data prepare`: the process that does it, which imports what reads data."""

from __future__ import annotations

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe, to_yaml


def prepare(recipe: Recipe) -> int:
    """Tokenize its data into the cache; returns the exit status of the process that does it.

    Raises:
        InputError: the user's own function makes its samples.
    """
    if recipe.data.is_custom:
        raise InputError(
            "data.train: is custom, and there is nothing to prepare: its factory makes the samples"
        )
    return tasks.run_alone(tasks.DataRequest(to_yaml(recipe)))

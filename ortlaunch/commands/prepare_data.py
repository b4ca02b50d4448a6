"""`ortlaunch data prepare`: start the process that tokenizes the data."""

from __future__ import annotations

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe, to_yaml


def prepare(recipe: Recipe) -> int:
    """Tokenize the recipe's data into the cache, and return the exit status of that process.

    Raises:
        InputError: the samples come from a function of the user.
    """
    if recipe.data.is_custom:
        raise InputError(
            "data.train: is custom, so there is nothing to prepare: its factory makes the samples"
        )
    # In a process of its own, which imports the libraries that read data.
    return tasks.run_alone(tasks.DataRequest(to_yaml(recipe)))

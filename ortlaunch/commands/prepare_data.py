"""`ortlaunch data prepare` and `show`: start the process that tokenizes the data."""

from __future__ import annotations

import json

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe, to_yaml


def prepare(recipe: Recipe) -> int:
    """Tokenize the recipe's data into the cache, and return the exit status of that process.

    Raises:
        InputError: the samples come from a function of the user.
    """
    # In a process of its own, which imports the libraries that read data.
    return tasks.run_alone(tasks.DataRequest(_readable(recipe)))


def show(recipe: Recipe, samples: int, as_json: bool) -> int:
    """Print samples of the recipe's data and an audit, and return the process's exit status.

    Raises:
        InputError: the samples come from a function of the user.
    """
    return tasks.run_alone(tasks.ShowDataRequest(_readable(recipe), samples, as_json))


def audited(recipe: Recipe, samples: int) -> Json:
    """Return the JSON of `show`.

    Raises:
        InputError: the samples come from a function of the user.
        RunError: the data cannot be read.
    """
    request = tasks.ShowDataRequest(_readable(recipe), samples, json=True)
    found: Json = json.loads(tasks.answer_of(request))
    return found


def _readable(recipe: Recipe) -> str:
    if recipe.data.is_custom:
        raise InputError(
            "data.train: is custom, so there is nothing to prepare: its factory makes the samples"
        )
    return to_yaml(recipe)

"""`ortlaunch data prepare` and `show`: start the process that tokenizes the data."""

from __future__ import annotations

import json

from ortlaunch.api.inputs import RecipeSource, load
from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.tables import tasks


def tokenize_data_into_cache(recipe: Recipe) -> int:
    """Tokenize the recipe's data into the cache, and return the exit status of that process.

    Raises:
        InputError: the samples come from a function of the user.
    """
    if recipe.data.is_custom:
        raise InputError(
            "data.train: is custom, so there is nothing to prepare: its factory makes the samples; "
            "`ortlaunch data show` shows some of them"
        )
    # In a process of its own, which imports the libraries that read data.
    return tasks.run_task_alone(tasks.DataRequest(dump_recipe_yaml(recipe)))


def show_data(
    source: RecipeSource, *assignments: str, samples: int = 3, **overrides: object
) -> Json:
    """Return samples as the model will see them, and an audit of the data.

    Args:
        source, assignments, overrides: as in `load`.
        samples: samples of `data.train` and of `data.evaluation`.

    Returns:
        The JSON of `ortlaunch data show --json`.

    Raises:
        InputError: the recipe is wrong.
        RunError: the data cannot be read.
    """
    request = _show_data_request(load(source, *assignments, **overrides), samples, as_json=True)
    audit: Json = json.loads(tasks.run_task_and_return_stdout_or_raise(request))
    return audit


def show_samples(recipe: Recipe, sample_count: int, as_json: bool) -> int:
    """Print samples of the recipe's data and an audit, and return the process's exit status."""
    return tasks.run_task_alone(_show_data_request(recipe, sample_count, as_json))


def _show_data_request(recipe: Recipe, sample_count: int, as_json: bool) -> tasks.ShowDataRequest:
    return tasks.ShowDataRequest(dump_recipe_yaml(recipe), sample_count, as_json, recipe._folder)

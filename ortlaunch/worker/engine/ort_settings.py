"""Convert the recipe's section `engine` to settings of ortmodule/.

Errors of ortmodule are raised as the launcher's; a setting is the field of `engine` with its name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import ortmodule
from ortlaunch.base import machine
from ortlaunch.base.errors import EngineError, MissingDependency
from ortlaunch.base.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.ort_variables import (
    ort_variable_and_contradiction_pairs,
    variables_in,
)
from ortmodule import Settings

# Settings with the same name and value in the recipe. The recipe's `postprocess` is the name of a
# function, which `wrap_model_in_ortmodule` imports later.
_SHARED_FIELDS = [
    field.name
    for field in dataclasses.fields(Settings)
    if field.name in Engine.model_fields and field.name != "postprocess"
]
_variables: dict[str, str] = {}


def ortmodule_settings(engine: Engine, **other_settings: object) -> Settings:
    """Return the settings of ortmodule for the recipe's section `engine`.

    Args:
        engine: the section. Most settings have the same name there; some have another name.
        other_settings: settings that are not in the recipe.
    """
    lowers_precision = engine.matmul_precision != "highest"
    shared_settings = {name: getattr(engine, name) for name in _SHARED_FIELDS}
    return Settings(
        **{**shared_settings, "tf32": lowers_precision, "allow_fallback": False, **other_settings}
    )


def import_ortmodule_with_settings(engine: Engine, environ: Mapping[str, str] = os.environ) -> None:
    """Import ORTModule with the recipe's settings; call this once, before transformers is imported.

    Raises:
        EngineError: this host's environment contradicts the recipe, or a setting needs a part that
            is not installed.
        MissingDependency: ORTModule cannot be imported.
    """
    contradictory_variables = [
        f"{name}={environ[name]} on this host {reason}"
        for name, reason in ort_variable_and_contradiction_pairs(engine, environ)
    ]
    if contradictory_variables:
        raise EngineError("\n".join(contradictory_variables))
    _variables.update(variables_in(environ))
    try:
        ortmodule.load(ortmodule_settings(engine))
    except ortmodule.ORTModuleError as error:
        raise launcher_error(error) from None


def free_memory_bytes_of_rank(ranks_on_host: int) -> int:
    """Return a rank's share of the host's free memory, by the tightest limit."""
    return machine.memory_limit_with_least_free().free_bytes // ranks_on_host


def launcher_error(error: ortmodule.ORTModuleError) -> EngineError | MissingDependency:
    """Return the launcher's error for an error of ortmodule."""
    if isinstance(error, ortmodule.SettingError):
        return EngineError(f"engine.{error.setting}: {error.problem}")
    return (MissingDependency if isinstance(error, ortmodule.MissingDependency) else EngineError)(
        str(error)
    )


def recipe_settings_and_ort_variables(recipe: Recipe) -> Json:
    """Return the settings that the recipe gives, and ORTModule's environment variables.

    They are a part of engine.json. `prepare` has checked that the variables agree with the recipe.
    """
    recipe_settings = recipe.engine.model_dump(
        mode="json", exclude_defaults=True, exclude={"name", "allow_fallback"}
    )
    return {"settings": recipe_settings, "variables": dict(_variables)}

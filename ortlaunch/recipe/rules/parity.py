"""The number of first steps that are compared with plain PyTorch (`engine.parity_steps`)."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.pretrained import read_local_model_config_or_none
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.tables.families import family_with_all_fields_or_none

MAX_PARAMETERS_OF_AUTOMATIC_COMPARISON = 500_000_000


class ParityStepCount(NamedTuple):
    """The number of compared steps, and the reason where `auto` decided on engine ort."""

    steps: int
    reason: str = ""


def parity_step_count_and_reason(recipe: Recipe, model_type: str | None = None) -> ParityStepCount:
    """Return the number of first steps of a training that are compared with plain PyTorch.

    `auto` compares the first step of every model but those that ortlaunch's tests compare in
    many forms, and of models that a plan of the recipe slices.

    Args: recipe: the training's. model_type: the built model's type, where it is known.
    """
    requested_steps = recipe.engine.parity_steps
    if requested_steps != "auto":
        return ParityStepCount(requested_steps)
    if recipe.parallel and recipe.parallel.tensor_plan:
        return ParityStepCount(1, "your parallel.tensor_plan")
    if recipe.engine.name != "ort":
        return ParityStepCount(0)
    if recipe.zero and recipe.zero.stage == 3:
        return ParityStepCount(0, "under ZeRO 3 no rank has all weights for the comparison")
    if recipe.engine.postprocess:
        return ParityStepCount(1, "engine.postprocess changes the graph")
    if recipe.model.factory:
        return ParityStepCount(1, "your own model")
    known_type = model_type or _local_model_type_or_none(recipe)
    if family_with_all_fields_or_none(known_type) is not None:
        return ParityStepCount(0, f"every release of ortlaunch compares {known_type} with it")
    return ParityStepCount(1, "as every model but BERT and Llama")


def is_divided_model_compared(recipe: Recipe, parameter_count: int) -> bool:
    """Return whether rank 0 runs the first pass of a model that `parallel` divides.

    `auto` leaves out a model that takes a CPU too long.
    """
    steps, reason = parity_step_count_and_reason(recipe)
    return steps > 0 and not (reason and parameter_count > MAX_PARAMETERS_OF_AUTOMATIC_COMPARISON)


def _local_model_type_or_none(recipe: Recipe) -> str | None:
    """Return the model's type from its config, as far as that is on this host."""
    pretrained_config = (
        read_local_model_config_or_none(recipe.model.pretrained)
        if recipe.model.pretrained
        else None
    )
    # `model.config` overrides fields of the pretrained config.
    model_type = {**(pretrained_config or {}), **(recipe.model.config or {})}.get("model_type")
    return str(model_type) if model_type else None

"""The number of first steps that are compared with plain PyTorch (`engine.parity_steps`)."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.pretrained import read_local_model_config_or_none
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.tables.families import family_with_all_fields_or_none


class ParityStepCount(NamedTuple):
    """The number of compared steps, and the reason where `auto` decided on engine ort."""

    steps: int
    reason: str = ""


def parity_step_count_and_reason(recipe: Recipe, model_type: str | None = None) -> ParityStepCount:
    """Return the number of first steps of a training that are compared with plain PyTorch.

    `auto` compares the first step of every model but those that ortlaunch's tests compare in
    many forms.

    Args: recipe: the training's. model_type: the built model's type, where it is known.
    """
    requested_steps = recipe.engine.parity_steps
    if requested_steps != "auto":
        return ParityStepCount(requested_steps)
    if recipe.engine.name != "ort":
        return ParityStepCount(0)
    if recipe.weight_sharding:
        reason = f"under {recipe.weight_sharding} no rank has all weights for the comparison"
        return ParityStepCount(0, reason)
    if recipe.engine.postprocess:
        return ParityStepCount(1, "engine.postprocess changes the graph")
    if recipe.model.factory:
        return ParityStepCount(1, "your own model")
    known_type = model_type or _local_model_type_or_none(recipe)
    if family_with_all_fields_or_none(known_type) is not None:
        return ParityStepCount(0, f"every release of ortlaunch compares {known_type} with it")
    return ParityStepCount(1, "as every model but BERT and Llama")


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

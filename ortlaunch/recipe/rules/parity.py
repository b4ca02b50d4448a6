"""The number of first steps that are compared with plain PyTorch (`engine.parity_steps`)."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.families import FAMILIES
from ortlaunch.recipe.fields.pretrained import config_of
from ortlaunch.recipe.fields.recipe import Recipe


class Compared(NamedTuple):
    """The number of compared steps, and the reason where `auto` decided on engine ort."""

    steps: int
    why: str = ""


def compared_steps(recipe: Recipe, model_type: str | None = None) -> Compared:
    """Return the number of first steps of a training that are compared with plain PyTorch.

    `auto` compares the first step of every model but those that ortlaunch's tests compare in
    many forms.

    Args: recipe: the training's. model_type: the built model's type, where it is known.
    """
    asked = recipe.engine.parity_steps
    if asked != "auto":
        return Compared(asked)
    if recipe.engine.name != "ort":
        return Compared(0)
    if recipe.zero and recipe.zero.stage == 3:
        return Compared(0, "under ZeRO 3 no rank has all weights for the comparison")
    if recipe.engine.postprocess:
        return Compared(1, "engine.postprocess changes the graph")
    if recipe.model.factory:
        return Compared(1, "your own model")
    family = model_type or _family(recipe)
    if family in FAMILIES:
        return Compared(0, f"every release of ortlaunch compares {family} with it")
    return Compared(1, "as every model but BERT and Llama")


def _family(recipe: Recipe) -> str | None:
    """Return the model's type from its config, as far as that is on this host."""
    known = config_of(recipe.model.pretrained) if recipe.model.pretrained else None
    # `model.config` overrides fields of the pretrained config.
    found = {**(known or {}), **(recipe.model.config or {})}.get("model_type")
    return str(found) if found else None

"""The table of shipped recipes: model, method, engine, and memory by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import aligned_table_lines
from ortlaunch.planning.fitting import world_of_gpus
from ortlaunch.planning.workload import solve_batch_and_estimate_memory
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.resolve.shipped import shipped_recipe_names, shipped_recipe_path_or_refuse

_GPU_COUNTS = (1, 8)


@dataclass(frozen=True)
class ShippedRecipe:
    """A row of `ortlaunch recipes list`."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    recipe: str
    """The name that `train`, `recipes show` and `recipes copy` take."""
    model: str
    """The pretrained model, the type of a new one, or the factory of an own one."""
    method: str
    """`new weights`, `all weights` or `LoRA`."""
    engine: str
    """The recipe's `engine.name`."""
    gibibytes_of_1_gpu: float | None
    """Memory by the plan, in GiB, on one GPU; null: not known before a run."""
    gibibytes_of_8_gpus: float | None
    """The same on each of 8 GPUs; null also where the batch does not split."""


def shipped_recipes_with_memory() -> list[ShippedRecipe]:
    """Return a row for every shipped recipe, sorted by name."""
    rows = []
    for recipe_name in shipped_recipe_names():
        recipe = load_recipe(shipped_recipe_path_or_refuse(recipe_name)).recipe
        memory = (_gpu_gibibytes_or_none(recipe, ranks) for ranks in _GPU_COUNTS)
        rows.append(
            ShippedRecipe(
                recipe_name,
                _model_name(recipe),
                _method_name(recipe),
                recipe.engine.name,
                *memory,
            )
        )
    return rows


def shipped_recipe_table_lines(recipes: Sequence[ShippedRecipe]) -> list[str]:
    """Return the lines of a table of recipes, under a header; `-` for unknown memory."""
    rows = [("recipe", "model", "method", "engine", "1 GPU", "8 GPUs")]
    for recipe in recipes:
        *texts, gibibytes_of_1_gpu, gibibytes_of_8_gpus = astuple(recipe)
        memory = (
            "-" if x is None else f"{x:.1f}" for x in (gibibytes_of_1_gpu, gibibytes_of_8_gpus)
        )
        rows.append((*texts, *memory))
    return [
        *aligned_table_lines(rows),
        "1 GPU, 8 GPUs: GiB on each, by `ortlaunch plan`; -: not known before a run",
    ]


def _model_name(recipe: Recipe) -> str:
    model = recipe.model
    return str(model.pretrained or (model.config or {}).get("model_type") or model.factory)


def _method_name(recipe: Recipe) -> str:
    if recipe.model.lora:
        return "LoRA"
    return "all weights" if recipe.model.pretrained else "new weights"


def _gpu_gibibytes_or_none(recipe: Recipe, rank_count: int) -> float | None:
    try:
        memory = solve_batch_and_estimate_memory(recipe, world_of_gpus(1, rank_count)).memory
    except PlanError:
        return None
    if memory is None:
        return None
    return dict(memory.by_stage)[memory.chosen].total / 2**30

"""The table of shipped recipes: model, method, engine, and memory by the plan."""

from __future__ import annotations

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import aligned_table_lines
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.planning.workload import solve_batch_equation_or_refuse
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.resolve.shipped import shipped_recipe_names, shipped_recipe_path_or_refuse

_GPU_COUNTS = (1, 8)


def shipped_recipe_lines_with_planned_gpu_memory() -> list[str]:
    """Return the lines of a table of all shipped recipes, under a header.

    Memory is the plan's, in GiB on each of 1 and of 8 GPUs; `-` where a plan cannot count it, or
    the batch does not split.
    """
    rows: list[tuple[str, ...]] = [("recipe", "model", "method", "engine", "1 GPU", "8 GPUs")]
    for recipe_name in shipped_recipe_names():
        recipe = load_recipe(shipped_recipe_path_or_refuse(recipe_name)).recipe
        memory_texts = (_gpu_gibibytes_text_or_dash(recipe, ranks) for ranks in _GPU_COUNTS)
        rows.append(
            (
                recipe_name,
                _model_name(recipe),
                _method_name(recipe),
                recipe.engine.name,
                *memory_texts,
            )
        )
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


def _gpu_gibibytes_text_or_dash(recipe: Recipe, rank_count: int) -> str:
    try:
        memory = estimate_rank_memory_or_none(
            recipe,
            solve_batch_equation_or_refuse(recipe, rank_count).micro_samples,
            rank_count,
            "cuda",
        )
    except PlanError:
        return "-"
    if memory is None:
        return "-"
    return f"{dict(memory.by_stage)[memory.chosen].total / 2**30:.1f}"

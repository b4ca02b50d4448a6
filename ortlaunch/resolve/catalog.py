"""The table of shipped recipes: model, method, engine, and memory by the plan."""

from __future__ import annotations

from ortlaunch.errors import PlanError
from ortlaunch.planning.memory import estimate
from ortlaunch.planning.workload import solve_batch
from ortlaunch.recipe import Recipe, load
from ortlaunch.resolve.shipped import find, names
from ortlaunch.units import align_columns

_WORLDS = (1, 8)


def catalog() -> list[str]:
    """Return the lines of a table of all shipped recipes, under a header.

    Memory is the plan's, in GiB on each of 1 and of 8 GPUs; `-` where a plan cannot count it, or
    the batch does not split.
    """
    rows: list[tuple[str, ...]] = [("recipe", "model", "method", "engine", "1 GPU", "8 GPUs")]
    for name in names():
        recipe = load(find(name)).recipe
        memory = (_memory(recipe, ranks) for ranks in _WORLDS)
        rows.append((name, _model(recipe), _method(recipe), recipe.engine.name, *memory))
    return [
        *align_columns(rows),
        "1 GPU, 8 GPUs: GiB on each, by `ortlaunch plan`; -: not known before a run",
    ]


def _model(recipe: Recipe) -> str:
    model = recipe.model
    return str(model.pretrained or (model.config or {}).get("model_type") or model.factory)


def _method(recipe: Recipe) -> str:
    if recipe.model.lora:
        return "LoRA"
    return "all weights" if recipe.model.pretrained else "new weights"


def _memory(recipe: Recipe, ranks: int) -> str:
    try:
        memory = estimate(recipe, solve_batch(recipe, ranks).micro_samples, ranks, "cuda")
    except PlanError:
        return "-"
    if memory is None:
        return "-"
    return f"{dict(memory.by_stage)[memory.chosen].total / 2**30:.1f}"

"""Suggest settings that need less memory to a run that ran out of it, by the plan's estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import Plan, ProcessMemory
from ortlaunch.planning.describe import memory_lines
from ortlaunch.planning.memory import estimate
from ortlaunch.planning.process_memory import process_memory
from ortlaunch.recipe import Recipe, read_resolved
from ortlaunch.units import human_bytes

_UNKNOWN = (
    "the plan has no estimate for this model; to use less memory per rank: a lower "
    "batch.micro_size (accumulation keeps global_size) or auto, zero.stage 1 to 3 on several "
    "ranks, model.gradient_checkpointing: true"
)


def what_would_fit(found: Evidence) -> list[str]:
    """Return the plan's memory table, then settings that need less, compared with a known limit."""
    plan = found.plan
    if plan is None or plan.memory is None:
        return [f"what would fit: {_UNKNOWN}"]
    recipe = read_resolved(found.run.recipe)
    limit = _limit(found, plan)
    # The run itself may have measured its process.
    process = process_memory(recipe)
    rows = [*_less(recipe, plan, process)]
    # The run reached the limit, so the plan's estimate was too low by at least this factor.
    scale = max(1.0, limit / rows[0][1]) if limit else 1.0
    head = "what would fit" + (
        f" (by the plan, with {human_bytes(process.total)} for the process)"
        if plan.device == "cpu"
        else ""
    )
    more = f", {scale:.2f} times as much, because the run reached the limit" if scale > 1 else ""
    shown = f"{head}{more}: {human_bytes(limit)} per rank is the limit there" if limit else head
    table = memory_lines(plan.memory._replace(process=process), plan.world_size > 1, plan.device)
    return [*table, shown, *(_row(said, math.ceil(scale * size), limit) for said, size in rows)]


def _limit(found: Evidence, plan: Plan) -> int | None:
    """Return the memory limit of each rank on the failed rank's host, in bytes; None if unknown."""
    limit = found.first.get("memory_limit")
    return (
        int(limit["bytes"]) // plan.node_of(found.first["rank"]).slots
        if limit and plan.device == "cpu"
        else None
    )


def _less(recipe: Recipe, plan: Plan, process: ProcessMemory) -> Iterator[tuple[str, int]]:
    """Yield (setting, bytes of a rank with it); the current recipe comes first."""
    micro = plan.batch.micro_samples

    def total(changed: Recipe, micro_samples: int) -> int:
        memory = estimate(changed, micro_samples, plan.world_size, plan.device, process)
        assert memory is not None  # the plan has one
        parts = dict(memory.by_stage)[memory.chosen]
        return parts.total + (process.total if plan.device == "cpu" else 0)

    now = total(recipe, micro)
    yield "as it is", now
    sizes = [micro >> halvings for halvings in range(1, micro.bit_length())]
    for size in sizes:
        yield f"batch.micro_size: {size}", total(recipe, size)
    changed = recipe
    # Each setting is estimated alone; those that help are then combined.
    for setting, update in _settings(recipe, plan.world_size):
        size = total(_with(recipe, update), micro)
        if size < now:
            yield setting, size
            changed = _with(changed, update)
    if changed is not recipe and sizes:
        yield f"all of these, batch.micro_size: {sizes[-1]}", total(changed, sizes[-1])


def _settings(recipe: Recipe, ranks: int) -> Iterator[tuple[str, dict[str, dict[str, object]]]]:
    # A recipe with engine ort and ZeRO 3 is rejected (recipe/rules/engine_rules.py).
    most = 2 if recipe.engine.name == "ort" else 3
    stage = recipe.zero.stage if recipe.zero else 0
    if ranks > 1 and stage < most and not recipe.optimizer.traits.needs_whole_tensors:
        yield f"zero.stage: {most}", {"zero": {"stage": most}}
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing: true", {"model": {"gradient_checkpointing": True}}
    if recipe.engine.chunked_loss == "off":
        yield "engine.chunked_loss: auto", {"engine": {"chunked_loss": "auto"}}


def _with(recipe: Recipe, update: dict[str, Json]) -> Recipe:
    """Return the recipe with these fields of its sections replaced."""
    raw = recipe.model_dump(exclude_unset=True)
    return Recipe.model_validate(
        {**raw, **{name: {**(raw.get(name) or {}), **each} for name, each in update.items()}}
    )


def _row(said: str, total: int, limit: int | None) -> str:
    fits = "" if limit is None else ", fits" if total < limit else ", does not fit"
    return f"    {said:<44}{human_bytes(total):>11}{fits}"

"""Suggest settings that need less memory to a run that ran out of it, by the plan's estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortlaunch.base.units import human_bytes
from ortlaunch.launch_plan import Plan, ProcessMemory
from ortlaunch.planning.describe import memory_table_and_note_lines
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe import Recipe, read_resolved_recipe_of_run
from ortlaunch.run_folder.cached_process_memory import cached_or_usual_process_memory
from ortlaunch.run_folder.error_record import ErrorRecord
from ortlaunch.run_folder.folder import RunDir

_UNKNOWN_TEXT = (
    "the plan has no estimate for this model; to use less memory per rank: a lower "
    "batch.micro_size (accumulation keeps global_size) or auto, zero.stage 1 to 3 on several "
    "ranks, model.gradient_checkpointing: true"
)


def memory_table_and_smaller_setting_lines(run: RunDir, record: ErrorRecord | None) -> list[str]:
    """Return the plan's memory table, then settings that need less, compared with a known limit.

    Args:
        record: the error record of the cause, which has the limit; None if there is none.
    """
    # The run may have ended before its plan was written.
    plan = Plan.read(run.plan) if run.plan.exists() else None
    if plan is None or plan.memory is None:
        return [f"what would fit: {_UNKNOWN_TEXT}"]
    recipe = read_resolved_recipe_of_run(run.recipe)
    limit_bytes = _memory_limit_bytes_per_rank_or_none(record, plan)
    # The run itself may have measured its process.
    process_bytes = cached_or_usual_process_memory(recipe)
    settings_with_bytes = [
        *_present_and_smaller_setting_rank_bytes_pairs(recipe, plan, process_bytes)
    ]
    # The run reached the limit, so the plan's estimate was too low by at least this factor.
    estimate_factor = max(1.0, limit_bytes / settings_with_bytes[0][1]) if limit_bytes else 1.0
    head_text = "what would fit" + (
        f" (by the plan, with {human_bytes(process_bytes.total)} for the process)"
        if plan.device == "cpu"
        else ""
    )
    factor_text = (
        f", {estimate_factor:.2f} times as much, because the run reached the limit"
        if estimate_factor > 1
        else ""
    )
    head_line = (
        f"{head_text}{factor_text}: {human_bytes(limit_bytes)} per rank is the limit there"
        if limit_bytes
        else head_text
    )
    table_lines = memory_table_and_note_lines(
        plan.memory._replace(process=process_bytes), plan.world_size > 1, plan.device
    )
    return [
        *table_lines,
        head_line,
        *(
            _suggestion_row(setting_text, math.ceil(estimate_factor * rank_bytes), limit_bytes)
            for setting_text, rank_bytes in settings_with_bytes
        ),
    ]


def _memory_limit_bytes_per_rank_or_none(record: ErrorRecord | None, plan: Plan) -> int | None:
    """Return the memory limit of each rank on the failed rank's host, in bytes; None if unknown."""
    if record is None or record.memory_limit is None or plan.device != "cpu":
        return None
    return int(record.memory_limit["bytes"]) // plan.node_of(record.rank).slots


def _present_and_smaller_setting_rank_bytes_pairs(
    recipe: Recipe, plan: Plan, process_bytes: ProcessMemory
) -> Iterator[tuple[str, int]]:
    """Yield (setting, bytes of a rank with it); the current recipe comes first."""
    present_micro_samples = plan.batch.micro_samples

    def total_bytes(changed_recipe: Recipe, micro_samples: int) -> int:
        planned_memory = estimate_rank_memory_or_none(
            changed_recipe,
            micro_samples,
            plan.world_size,
            plan.device,
            process_bytes,
            plan.mesh.ranks_of_copy if plan.mesh else None,
        )
        assert planned_memory is not None  # the plan has one
        stage_bytes = dict(planned_memory.by_stage)[planned_memory.chosen]
        return stage_bytes.total + (process_bytes.total if plan.device == "cpu" else 0)

    present_bytes = total_bytes(recipe, present_micro_samples)
    yield "as it is", present_bytes
    smaller_sizes = [
        present_micro_samples >> halvings
        for halvings in range(1, present_micro_samples.bit_length())
    ]
    for rank_bytes in smaller_sizes:
        yield f"batch.micro_size: {rank_bytes}", total_bytes(recipe, rank_bytes)
    changed_recipe = recipe
    # Each setting is estimated alone; those that help are then combined.
    for setting_text, field_values in _memory_saving_setting_texts_and_fields(
        recipe, plan.world_size
    ):
        rank_bytes = total_bytes(
            _recipe_with_replaced_section_fields(recipe, field_values), present_micro_samples
        )
        if rank_bytes < present_bytes:
            yield setting_text, rank_bytes
            changed_recipe = _recipe_with_replaced_section_fields(changed_recipe, field_values)
    if changed_recipe is not recipe and smaller_sizes:
        yield (
            f"all of these, batch.micro_size: {smaller_sizes[-1]}",
            total_bytes(changed_recipe, smaller_sizes[-1]),
        )


def _memory_saving_setting_texts_and_fields(
    recipe: Recipe, rank_count: int
) -> Iterator[tuple[str, dict[str, dict[str, object]]]]:
    # A recipe with engine ort and ZeRO 3 is rejected (recipe/rules/engine_rules.py).
    highest_stage = 2 if recipe.engine.name == "ort" else 3
    stage = recipe.zero.stage if recipe.zero else 0
    if rank_count > 1 and stage < highest_stage and not recipe.optimizer.traits.needs_whole_tensors:
        yield f"zero.stage: {highest_stage}", {"zero": {"stage": highest_stage}}
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing: true", {"model": {"gradient_checkpointing": True}}
    if recipe.engine.chunked_loss == "off":
        yield "engine.chunked_loss: auto", {"engine": {"chunked_loss": "auto"}}


def _recipe_with_replaced_section_fields(
    recipe: Recipe, fields_by_section: dict[str, dict[str, object]]
) -> Recipe:
    recipe_values = recipe.model_dump(exclude_unset=True)
    return Recipe.model_validate(
        {
            **recipe_values,
            **{
                name: {**(recipe_values.get(name) or {}), **section_values}
                for name, section_values in fields_by_section.items()
            },
        }
    )


def _suggestion_row(setting_text: str, rank_bytes: int, limit_bytes: int | None) -> str:
    fit_text = (
        "" if limit_bytes is None else ", fits" if rank_bytes < limit_bytes else ", does not fit"
    )
    return f"    {setting_text:<44}{human_bytes(rank_bytes):>11}{fit_text}"

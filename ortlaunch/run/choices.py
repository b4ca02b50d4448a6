"""Resolve `engine.name: auto` and `batch.micro_size: auto`, from records or by measurements.

A measurement starts ranks with a plan of its own. The run's plan is made after all choices.
"""

from __future__ import annotations

from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run import micro_size
from ortlaunch.run_folder.folder import RunDir


def apply_recorded_engine_and_micro_size(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """Return the run with the choices that an earlier start or measurement recorded.

    Raises:
        PlanError: a choice is not recorded, and this process is a rank of the user's own launcher,
            which cannot start the jobs of a measurement.
    """
    recorded_micro_size = None
    if micro_size.is_search_requested(resolved.recipe_file.recipe):
        recorded_micro_size = micro_size.recorded_micro_size_or_none(
            resolved.recipe_file.recipe, resolved.workload.batch, run
        )
        # A rank may use a recorded size, but cannot start trials.
        if recorded_micro_size is None and resolved.world.enclosing_rank is not None:
            micro_size.refuse_micro_size_search_in_rank()
    if resolved.recipe_file.recipe.engine.name == "auto":
        # Imported on use: only a run with an open engine needs the bench.
        from ortlaunch.bench import auto

        recorded_engine = auto.recorded_or_short_run_choice_and_source_or_none(resolved, run)
        resolved = (
            auto.apply_engine_choice_and_allow_unmeasured_ort_to_fall_back(
                resolved, *recorded_engine
            )
            if recorded_engine
            else resolved
        )
    return (
        resolved
        if recorded_micro_size is None
        else resolved.apply_auto_results(f"batch.micro_size={recorded_micro_size}")
    )


def measure_cache_and_apply_engine(resolved: ResolvedRun) -> ResolvedRun:
    """Measure the engines now; return the run with the best, and store the choice in the cache."""
    from ortlaunch.bench import auto

    choice = auto.measure_engines_and_choose_or_default_if_too_long(
        resolved, lambda text: print(text, flush=True)
    )
    return auto.apply_engine_choice_and_allow_unmeasured_ort_to_fall_back(
        resolved, auto.cache_measured_engine_choice_and_add_its_key(resolved, choice)
    )


def search_and_apply_micro_size_if_auto(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """Return the run with its micro batch size; if that is `auto`, search the largest that fits."""
    if not micro_size.is_search_requested(resolved.recipe_file.recipe):
        return resolved
    found_size = micro_size.search_and_record_largest_micro_size(
        resolved.recipe_file.recipe, resolved.plan, run
    )
    return resolved.apply_auto_results(f"batch.micro_size={found_size}")

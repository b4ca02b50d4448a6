"""Resolve `engine.name: auto` and `batch.micro_size: auto`, from records or by measurements.

A measurement starts ranks with a plan of its own. The run's plan is made after all choices.
"""

from __future__ import annotations

from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run import micro_size
from ortlaunch.run_folder.folder import RunDir


def with_recorded_choices(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """Return the run with the choices that an earlier start or measurement recorded.

    Raises:
        PlanError: a choice is not recorded, and this process is a rank of the user's own launcher,
            which cannot start the jobs of a measurement.
    """
    inside = resolved.world.inside
    size = None
    if micro_size.is_requested(resolved.file.recipe):
        size = micro_size.recorded_size(resolved.file.recipe, resolved.work.batch, run)
        # A rank may use a recorded size, but cannot start trials.
        if size is None and inside is not None:
            micro_size.refuse_inside()
    if engine_is_open(resolved):
        # Imported on use: only a run with an open engine needs the bench.
        from ortlaunch.bench import auto

        found = auto.recorded_choice(resolved, run)
        resolved = auto.applied(resolved, *found) if found else resolved
    return resolved if size is None else resolved.with_choice(micro_size.override(size))


def engine_is_open(resolved: ResolvedRun) -> bool:
    """Whether the engine must be measured."""
    return resolved.file.recipe.engine.name == "auto"


def with_measured_engine(resolved: ResolvedRun) -> ResolvedRun:
    """Measure the engines now; return the run with the best, and store the choice in the cache."""
    from ortlaunch.bench import auto

    choice = auto.measured(resolved, lambda text: print(text, flush=True))
    return auto.applied(resolved, auto.remember(resolved, choice))


def with_found_size(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """Return the run with its micro batch size; if that is `auto`, search the largest that fits."""
    if not micro_size.is_requested(resolved.file.recipe):
        return resolved
    size = micro_size.find(resolved.file.recipe, resolved.plan, run)
    return resolved.with_choice(micro_size.override(size))

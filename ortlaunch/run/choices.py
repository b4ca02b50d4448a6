"""Choices that a recipe leaves to `auto`, as values: from what is known already, or by trying.

A try is a start of its own, with its own plan. The run's plan comes after all choices.
"""

from __future__ import annotations

from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run import micro_size
from ortlaunch.run_folder.folder import RunDir


def known(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """The run with what an earlier start of it, or a measurement before it, has chosen.

    Raises:
        PlanError: a choice is open, and this process is a rank already, which can start no jobs.
    """
    inside = resolved.world.inside
    if micro_size.is_asked(resolved.file.recipe):
        size = micro_size.known(resolved.file.recipe, resolved.work.batch, run)
        if size is not None:
            resolved = resolved.with_choice(micro_size.override(size))
        elif inside is not None:
            micro_size.refuse_inside()
    if not engine_is_open(resolved) or (
        inside is not None and inside.rank > 0
    ):  # which starts what rank 0 has chosen
        return resolved
    from ortlaunch.bench import auto

    found = auto.known(resolved, run)
    return auto.applied(resolved, *found) if found else resolved


def engine_is_open(resolved: ResolvedRun) -> bool:
    """Whether the engine has to be measured."""
    return resolved.file.recipe.engine.name == "auto"


def with_measured_engine(resolved: ResolvedRun) -> ResolvedRun:
    """The run with the engine that a bench finds now, which is remembered."""
    from ortlaunch.bench import auto

    choice = auto.measured(resolved, lambda text: print(text, flush=True))
    return auto.applied(resolved, auto.remember(resolved, choice))


def with_found_size(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """The run with the largest micro batch that fits."""
    if not micro_size.is_asked(resolved.file.recipe):
        return resolved
    return resolved.with_choice(
        micro_size.override(micro_size.find(resolved.file.recipe, resolved.plan, run))
    )

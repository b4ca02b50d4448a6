"""`ortlaunch evaluate`: a run of its own in RUN/evaluations/step_N, whose ranks read a checkpoint and train nothing."""

from __future__ import annotations

import os
from typing import NamedTuple

from ortlaunch.commands.export import chosen_step
from ortlaunch.errors import InputError
from ortlaunch.plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe.fields.held_out import no_evaluation
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun, resolve
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import control, preview
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.held import held


class Asked(NamedTuple):
    """What was typed."""

    run: RunDir
    step: int | None
    overrides: tuple[str, ...]


def evaluate(asked: Asked, options: LaunchOptions) -> int:
    """Start the ranks; returns the exit status.

    Raises:
        InputError: there is no such run or checkpoint, or nothing to evaluate on.
    """
    with held(asked.run, lambda: chosen_step(asked.run, asked.step)) as step:
        resume = ResumeOptions(str(asked.run.checkpoint(step)))
        return control.train(_resolved(asked, options), asked.run.evaluation_of(step).path, resume)


def dry_run(asked: Asked, options: LaunchOptions) -> str:
    """What would be started."""
    step = chosen_step(asked.run, asked.step)
    return preview.dry_run(_resolved(asked, options), asked.run.evaluation_of(step))


def _resolved(asked: Asked, options: LaunchOptions) -> ResolvedRun:
    """The run's own recipe on whatever ranks there are now: nothing is trained, so that no global batch is kept."""
    trained = Plan.read(asked.run.plan)
    batch = ("batch.global_size=null", f"batch.micro_size={trained.batch.micro_samples}", "batch.accumulation_steps=1")
    environ = {**os.environ, MODULES_VARIABLE: trained.modules}
    found = resolve(asked.run.recipe, (*batch, *asked.overrides), options._replace(task="evaluate"), environ)
    data = found.file.recipe.data
    if data.evaluation is None:
        raise InputError(no_evaluation(asked.run.recipe, data))
    return found

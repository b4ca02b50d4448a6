"""`ortlaunch evaluate`: measure a checkpoint. It is a run of its own, in RUN/evaluations/step_N."""

from __future__ import annotations

import os
import sys

from ortlaunch.commands.export import chosen_step, print_best
from ortlaunch.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe.fields.held_out import no_evaluation
from ortlaunch.resolve.prepare import request_of
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun, resolve
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import control
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.held import hold_checkpoint
from ortlaunch.tasks import CheckpointStep


def evaluate(
    run: RunDir, step: CheckpointStep, overrides: tuple[str, ...], options: LaunchOptions
) -> int:
    """Run the evaluation to its end and return its exit status.

    Raises:
        InputError: the run or checkpoint does not exist, or the recipe has no evaluation data.
    """
    # Training may still run, so hold the checkpoint: it must not be deleted during the evaluation.
    with hold_checkpoint(run, lambda: chosen_step(run, step)) as chosen:
        print_best(run, step, chosen, sys.stdout)
        resume = ResumeOptions(str(run.checkpoint_folder(chosen)))
        return control.run_training_command(
            _resolved(run, overrides, options), run.evaluation_folder(chosen).path, resume
        )


def dry_run(
    run: RunDir, step: CheckpointStep, overrides: tuple[str, ...], options: LaunchOptions
) -> str:
    """Return the request that would be sent to the launcher."""
    folder = run.evaluation_folder(chosen_step(run, step))
    return str(request_of(_resolved(run, overrides, options).plan, folder))


def _resolved(run: RunDir, overrides: tuple[str, ...], options: LaunchOptions) -> ResolvedRun:
    """Return the run's recipe with batch and `overrides` applied, for the ranks available now."""
    # Nothing is trained, so keep the micro batch only; the global batch does not matter.
    trained = Plan.read(run.plan)
    batch = (
        "batch.global_size=null",
        f"batch.micro_size={trained.batch.micro_samples}",
        "batch.accumulation_steps=1",
    )
    environ = {**os.environ, MODULES_VARIABLE: trained.modules}
    found = resolve(run.recipe, (*batch, *overrides), options._replace(task="evaluate"), environ)
    data = found.file.recipe.data
    if data.evaluation is None:
        raise InputError(no_evaluation(run.recipe, data))
    return found

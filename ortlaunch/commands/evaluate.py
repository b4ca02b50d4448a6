"""`ortlaunch evaluate`: measure a checkpoint. It is a run of its own, in RUN/evaluations/step_N."""

from __future__ import annotations

import os
import sys

from ortlaunch.base.errors import InputError
from ortlaunch.commands.export import (
    existing_requested_or_newest_step_or_refuse,
    print_hint_if_best_is_not_newest,
)
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe.fields.held_out import missing_evaluation_message_with_example
from ortlaunch.resolve.prepare import launch_request
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun, load_and_resolve_recipe
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import control
from ortlaunch.run_folder.checkpoint_hold import lock_chosen_checkpoint_and_yield_step
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import CheckpointStep


def evaluate_checkpoint_in_own_run(
    run: RunDir,
    requested_step: CheckpointStep,
    overrides: tuple[str, ...],
    launch_options: LaunchOptions,
) -> int:
    """Run the evaluation to its end and return its exit status.

    Raises:
        InputError: the run or checkpoint does not exist, or the recipe has no evaluation data.
    """
    # Training may still run, so hold the checkpoint: it must not be deleted during the evaluation.
    with lock_chosen_checkpoint_and_yield_step(
        run, lambda: existing_requested_or_newest_step_or_refuse(run, requested_step)
    ) as checkpoint_step:
        print_hint_if_best_is_not_newest(run, requested_step, checkpoint_step, sys.stdout)
        resume = ResumeOptions(str(run.checkpoint_folder(checkpoint_step)))
        return control.lock_folder_and_run_training(
            _resolve_evaluation_with_training_batch_or_refuse(run, overrides, launch_options),
            run.evaluation_folder(checkpoint_step).path,
            resume,
        )


def evaluation_launch_request_text(
    run: RunDir,
    requested_step: CheckpointStep,
    overrides: tuple[str, ...],
    launch_options: LaunchOptions,
) -> str:
    """Return the request that would be sent to the launcher."""
    evaluation_folder = run.evaluation_folder(
        existing_requested_or_newest_step_or_refuse(run, requested_step)
    )
    return str(
        launch_request(
            _resolve_evaluation_with_training_batch_or_refuse(run, overrides, launch_options).plan,
            evaluation_folder,
        )
    )


def _resolve_evaluation_with_training_batch_or_refuse(
    run: RunDir, overrides: tuple[str, ...], launch_options: LaunchOptions
) -> ResolvedRun:
    """Return the run's recipe with batch and `overrides` applied, for the ranks available now."""
    # Nothing is trained, so keep the micro batch only; the global batch does not matter.
    training_plan = Plan.read(run.plan)
    batch_overrides = (
        "batch.global_size=null",
        f"batch.micro_size={training_plan.batch.micro_samples}",
        "batch.accumulation_steps=1",
    )
    environ = {**os.environ, MODULES_VARIABLE: training_plan.modules}
    resolved_run = load_and_resolve_recipe(
        run.recipe,
        (*batch_overrides, *overrides),
        launch_options._replace(task="evaluate"),
        environ,
    )
    data_section = resolved_run.recipe_file.recipe.data
    if data_section.evaluation is None:
        raise InputError(missing_evaluation_message_with_example(run.recipe, data_section))
    return resolved_run

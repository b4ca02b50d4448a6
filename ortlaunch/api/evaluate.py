"""`ortlaunch evaluate`: measure a checkpoint, or an exported model.

Of a checkpoint it is a run of its own, in RUN/evaluations/step_N.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ortlaunch.api.detached import (
    launch_options_as_command_arguments,
    start_detached_and_await_job_file_or_raise,
)
from ortlaunch.api.export import (
    enclosing_run_or_none,
    existing_requested_or_newest_step_or_refuse,
    print_hint_if_best_is_not_newest,
)
from ortlaunch.api.run_wait import wait_for_run_end_or_raise
from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import Recipe, dump_recipe_yaml, load_recipe
from ortlaunch.recipe.hints.missing_evaluation import missing_evaluation_message_with_example
from ortlaunch.resolve.prepare import launch_request
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun, load_and_resolve_recipe
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.resolve.shipped import recipe_path_or_shipped_recipe
from ortlaunch.run import control
from ortlaunch.run_folder.checkpoint_hold import lock_chosen_checkpoint_and_yield_step
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import CheckpointStep

# Settings of training, sharding and casting have no effect on an exported model.
_SINGLE_PROCESS_OVERRIDES = (
    "engine.name=eager",
    "zero=null",
    "precision=fp32",
    "model.lora=null",
    "model.gradient_checkpointing=false",
)


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


def start_evaluation_and_await_result(
    run: RunDir,
    assignments: tuple[str, ...],
    requested_step: CheckpointStep,
    launch_options: LaunchOptions,
    show_progress: bool,
) -> dict[str, object]:
    """Measure a checkpoint; arguments, result and errors are those of `Run.evaluate`."""
    chosen_checkpoint_step = existing_requested_or_newest_step_or_refuse(run, requested_step)
    # Errors are raised here, before anything starts.
    evaluation_launch_request_text(run, chosen_checkpoint_step, assignments, launch_options)
    folder = run.evaluation_folder(chosen_checkpoint_step)
    command = [
        "evaluate",
        str(run),
        *assignments,
        f"--step={chosen_checkpoint_step}",
        *launch_options_as_command_arguments(launch_options),
    ]
    start_detached_and_await_job_file_or_raise(command, folder, {})
    wait_for_run_end_or_raise(folder, show_progress)
    return dict(read_json_or_raise_damaged(folder.evaluation))


def is_model_path(given_path: Path) -> bool:
    """Whether the path is a model.onnx, or a folder of a model and not of a run."""
    return given_path.suffix == ".onnx" or (
        not RunDir(given_path).has_plan_and_recipe
        and any(
            (given_path / name).exists()
            for name in ("model.onnx", "config.json", "adapter_config.json")
        )
    )


def evaluate_exported_model_in_process(
    given_model: Path, recipe_path: Path | None, overrides: tuple[str, ...], prints_json: bool
) -> int:
    """Measure a model, and return the exit status of the process that does it.

    Args:
        recipe_path: a recipe with the evaluation corpus and the task; None: that of the run which
            contains the model.

    Raises:
        InputError: the model does not exist, or has no recipe or no evaluation data.
    """
    given_model = _onnx_file_or_model_folder_or_refuse(given_model)
    run = None if recipe_path else enclosing_run_or_none(given_model)
    if run is None and recipe_path is None:
        raise InputError(
            f"{given_model} is not in a run folder, so the task and data.evaluation are unknown; "
            "give a recipe with --recipe"
        )
    recipe_source = run.recipe if run else recipe_path_or_shipped_recipe(recipe_path or Path())
    modules_folder = Plan.read(run.plan).modules if run else str(recipe_source.parent.absolute())
    recipe_text = dump_recipe_yaml(
        _single_process_evaluation_recipe_or_refuse(recipe_source, given_model, overrides)
    )
    return tasks.run_task_alone(
        tasks.ModelEvaluationRequest(str(given_model), recipe_text, modules_folder, prints_json)
    )


def _onnx_file_or_model_folder_or_refuse(given_model: Path) -> Path:
    if not given_model.exists():
        raise InputError(f"no such file or folder: {given_model}")
    if given_model.is_dir() and (given_model / "model.onnx").exists():
        return given_model / "model.onnx"
    if given_model.is_dir() and not (given_model / "config.json").exists():
        raise InputError(
            f"{given_model} contains only adapters; evaluate the run, or an export with model.lora.merge"
        )
    return given_model


def _single_process_evaluation_recipe_or_refuse(
    recipe_source: Path, model_path: Path, overrides: tuple[str, ...]
) -> Recipe:
    model_folder = model_path if model_path.is_dir() else model_path.parent
    evaluation_overrides = list(_SINGLE_PROCESS_OVERRIDES)
    # The exported tokenizer is the one that the model was trained with.
    if (model_folder / "tokenizer_config.json").exists():
        evaluation_overrides.append(f"data.tokenizer={json.dumps(str(model_folder.absolute()))}")
    if model_path.is_dir():
        evaluation_overrides += [
            f"model.pretrained={json.dumps(str(model_path.absolute()))}",
            "model.config=null",
        ]
    recipe = load_recipe(recipe_source, (*evaluation_overrides, *overrides)).recipe
    if recipe.data.evaluation is None:
        raise InputError(missing_evaluation_message_with_example(recipe_source, recipe.data))
    if recipe.model.traits.is_own:
        raise InputError(
            f"{recipe_source}: the model is built by model.factory; use evaluate RUN for its checkpoints"
        )
    return recipe

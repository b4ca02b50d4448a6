"""`ortlaunch generate`: choose the model for a prompt, and start the process that continues it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ortlaunch.api.export import (
    enclosing_run_or_none,
    existing_requested_or_newest_step_or_refuse,
    print_hint_if_best_is_not_newest,
)
from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe, read_resolved_recipe_of_run
from ortlaunch.recipe.fields.data import is_written_by_chat_template
from ortlaunch.run_folder.checkpoint_hold import lock_chosen_checkpoint_and_yield_step
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import GenerationRequest

# Endings of transformers' classes of causal models.
_CAUSAL_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel")


def generate_text_in_process(
    generation_request: GenerationRequest, shows_progress: bool = False
) -> str:
    """Return the prompt and its continuation.

    Args:
        shows_progress: whether the model's folder and notes are printed on standard error.

    Raises:
        InputError: the model does not exist, or does not generate text.
        RunError: the process that generates failed.
    """
    if generation_request.tokens < 1 or generation_request.temperature < 0:
        values_text = (
            f"tokens: got {generation_request.tokens}, and temperature: got "
            f"{generation_request.temperature:g}"
        )
        raise InputError(f"{values_text}; tokens must be >= 1, and temperature >= 0")
    model_folder, checkpoint_step, is_trained_on_chats_or_none = (
        _model_or_run_folder_step_and_is_trained_on_chats(generation_request)
    )
    with contextlib.ExitStack() as stack:
        # A training may still run: the checkpoint must not be deleted meanwhile.
        if checkpoint_step is not None:
            run = RunDir(model_folder)
            checkpoint_step = stack.enter_context(
                lock_chosen_checkpoint_and_yield_step(
                    run,
                    lambda: existing_requested_or_newest_step_or_refuse(
                        run, generation_request.step
                    ),
                )
            )
        # On stderr, so that stdout has the text alone.
        if shows_progress:
            source_folder = (
                model_folder
                if checkpoint_step is None
                else RunDir(model_folder).checkpoint_folder(checkpoint_step)
            )
            print(f"model: {source_folder}", file=sys.stderr, flush=True)
            if checkpoint_step is not None:
                print_hint_if_best_is_not_newest(
                    run, generation_request.step, checkpoint_step, sys.stderr
                )
        is_trained_on_chats_or_none = (
            False if generation_request.raw else is_trained_on_chats_or_none
        )
        resolved_request = generation_request._replace(
            model=str(model_folder), step=checkpoint_step, chats=is_trained_on_chats_or_none
        )
        text = tasks.run_task_and_return_stdout_or_raise(
            resolved_request, ("stderr",) if shows_progress else ()
        )
        # Without the newline that the process prints last.
        return text.removesuffix("\n")


def _model_or_run_folder_step_and_is_trained_on_chats(
    generation_request: GenerationRequest,
) -> tuple[Path, int | None, bool | None]:
    """Return the source of the model, and whether it was trained on chats.

    Returns:
        The folder of a model and None, or the folder of a run and the step of a checkpoint; then
        whether it was trained on chats, None if unknown.
    """
    model_folder = Path(generation_request.model)
    run = RunDir(model_folder)
    if not run.has_plan_and_recipe:
        if generation_request.step is not None:
            raise InputError(f"--step: {model_folder} is not a run folder, and has no checkpoints")
        return (
            _require_causal_model_folder(model_folder),
            None,
            _is_enclosing_run_trained_on_chats(model_folder),
        )
    recipe = read_resolved_recipe_of_run(run.recipe)
    if recipe.model.traits.predicts != "next":
        raise InputError(f"{run} trains task {recipe.model.task}; only causal-lm generates text")
    checkpoint_step = existing_requested_or_newest_step_or_refuse(run, generation_request.step)
    # The run's own export is that of one step; others have checkpoints only.
    is_exported = _exported_step(run) == checkpoint_step and generation_request.step in (
        None,
        "best",
    )
    # An export of adapters alone has no config.json.
    if is_exported and (run.export / "config.json").exists():
        return run.export, None, is_trained_on_chats(recipe)
    return model_folder, checkpoint_step, is_trained_on_chats(recipe)


def _exported_step(run: RunDir) -> int | None:
    """Return the step of export/; None before the end of a training."""
    summary = read_json_or_raise_damaged(run.summary) if run.summary.exists() else {}
    best = summary.get("best") or {}
    return best["step"] if best.get("exported") else summary.get("steps")


def is_trained_on_chats(recipe: Recipe) -> bool:
    """Whether any training data of the recipe are chats."""
    return any(is_written_by_chat_template(part.source) for part in recipe.data.parts)


def _is_enclosing_run_trained_on_chats(model_folder: Path) -> bool | None:
    """Whether the run whose folder contains an export was trained on chats; None without a run."""
    run = enclosing_run_or_none(model_folder)
    return is_trained_on_chats(read_resolved_recipe_of_run(run.recipe)) if run else None


def _require_causal_model_folder(model_folder: Path) -> Path:
    config_path = model_folder / "config.json"
    if not config_path.exists():
        raise InputError(
            f"{model_folder} is neither a run folder (plan.json) nor a folder of a transformers model "
            "(config.json)"
        )
    class_names = read_json_or_raise_damaged(config_path).get("architectures") or []
    if not any(name.endswith(_CAUSAL_CLASS_ENDINGS) for name in class_names):
        raise InputError(
            f"{model_folder} contains a {', '.join(class_names) or 'model without a class'}; only causal "
            "models generate text"
        )
    return model_folder

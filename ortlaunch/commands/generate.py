"""`ortlaunch generate`: choose the model for a prompt, and start the process that continues it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ortlaunch import tasks
from ortlaunch.commands.export import chosen_step, print_best
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe, read_resolved
from ortlaunch.recipe.fields.data import uses_template
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.held import hold_checkpoint
from ortlaunch.tasks import GenerationRequest

# Folders from RUN/exports/step_N up to RUN.
_ABOVE = 2
# Endings of transformers' classes of causal models.
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def generate(request: GenerationRequest, progress: bool = False) -> str:
    """Return the prompt and its continuation.

    Args:
        progress: whether the model's folder and notes are printed on standard error.

    Raises:
        InputError: the model does not exist, or does not generate text.
        RunError: the process that generates failed.
    """
    if request.tokens < 1 or request.temperature < 0:
        given = f"tokens: got {request.tokens}, and temperature: got {request.temperature:g}"
        raise InputError(f"{given}; tokens must be >= 1, and temperature >= 0")
    model, step, chats = _source(request)
    with contextlib.ExitStack() as stack:
        # A training may still run: the checkpoint must not be deleted meanwhile.
        if step is not None:
            run = RunDir(model)
            step = stack.enter_context(hold_checkpoint(run, lambda: chosen_step(run, request.step)))
        # On stderr, so that stdout has the text alone.
        if progress:
            place = model if step is None else RunDir(model).checkpoint_folder(step)
            print(f"model: {place}", file=sys.stderr, flush=True)
            if step is not None:
                print_best(run, request.step, step, sys.stderr)
        chats = False if request.raw else chats
        chosen = request._replace(model=str(model), step=step, chats=chats)
        text = tasks.run_task_for_answer(chosen, ("stderr",) if progress else ())
        # Without the newline that the process prints last.
        return text.removesuffix("\n")


def _source(request: GenerationRequest) -> tuple[Path, int | None, bool | None]:
    """Return the source of the model, and whether it was trained on chats.

    Returns:
        The folder of a model and None, or the folder of a run and the step of a checkpoint; then
        whether it was trained on chats, None if unknown.
    """
    folder = Path(request.model)
    run = RunDir(folder)
    if not (run.plan.exists() and run.recipe.exists()):
        if request.step is not None:
            raise InputError(f"--step: {folder} is not a run folder, and has no checkpoints")
        return _require_causal(folder), None, _run_learned_chats(folder)
    recipe = read_resolved(run.recipe)
    if recipe.model.traits.predicts != "next":
        raise InputError(f"{run} trains task {recipe.model.task}; only causal-lm generates text")
    step = chosen_step(run, request.step)
    # The run's own export is that of one step; others have checkpoints only.
    is_exported = _exported_step(run) == step and request.step in (None, "best")
    # An export of adapters alone has no config.json.
    if is_exported and (run.export / "config.json").exists():
        return run.export, None, learned_chats(recipe)
    return folder, step, learned_chats(recipe)


def _exported_step(run: RunDir) -> int | None:
    """Return the step of export/; None before the end of a training."""
    summary = read_own_json(run.summary) if run.summary.exists() else {}
    best = summary.get("best") or {}
    return best["step"] if best.get("exported") else summary.get("steps")


def learned_chats(recipe: Recipe) -> bool:
    """Whether any training data of the recipe are chats."""
    return any(uses_template(part.source) for part in recipe.data.parts)


def _run_learned_chats(model: Path) -> bool | None:
    """Whether the run whose folder contains an export was trained on chats; None without a run."""
    for folder in model.absolute().parents[:_ABOVE]:
        run = RunDir(folder)
        if run.plan.exists() and run.recipe.exists():
            return learned_chats(read_resolved(run.recipe))
    return None


def _require_causal(folder: Path) -> Path:
    config = folder / "config.json"
    if not config.exists():
        raise InputError(
            f"{folder} is neither a run folder (plan.json) nor a folder of a transformers model "
            "(config.json)"
        )
    classes = read_own_json(config).get("architectures") or []
    if not any(name.endswith(_CAUSAL) for name in classes):
        raise InputError(
            f"{folder} contains a {', '.join(classes) or 'model without a class'}; only causal "
            "models generate text"
        )
    return folder

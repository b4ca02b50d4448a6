"""`ortlaunch generate`: which model goes on with a prompt, and the process that does it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ortlaunch import tasks
from ortlaunch.commands.export import chosen_step
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe, read_resolved
from ortlaunch.recipe.fields.data import is_chat
from ortlaunch.run_folder.folder import RunDir, read_json
from ortlaunch.run_folder.held import held
from ortlaunch.tasks import GenerationRequest

_ABOVE = 2  # folders from RUN/exports/step_N up to RUN
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how transformers' classes of such models end


def generate(request: GenerationRequest) -> int:
    """Print the prompt and what follows; returns the exit status of the process that does it.

    Raises:
        InputError: there is no such model, or it does not generate text.
    """
    model, step, chats = _source(request)
    with contextlib.ExitStack() as stack:
        if step is not None:
            run = RunDir(model)
            step = stack.enter_context(held(run, lambda: chosen_step(run, request.step)))
        return _generate(request, model, step, chats)


def _generate(request: GenerationRequest, model: Path, step: int | None, chats: bool | None) -> int:
    print(
        f"model: {model if step is None else RunDir(model).checkpoint(step)}",
        file=sys.stderr,
        flush=True,
    )
    chats = False if request.raw else chats
    return tasks.run_alone(request._replace(model=str(model), step=step, chats=chats))


def _source(request: GenerationRequest) -> tuple[Path, int | None, bool | None]:
    """A model's folder and None, or a run's and the step of a checkpoint; and whether it learned chats, if known."""
    folder = Path(request.model)
    run = RunDir(folder)
    if not (run.plan.exists() and run.recipe.exists()):
        if request.step is not None:
            raise InputError(f"--step: {folder} is no folder of a run, and has no checkpoints")
        return _require_causal(folder), None, _run_learned_chats(folder)
    recipe = read_resolved(run.recipe)
    if recipe.model.traits.predicts != "next":
        raise InputError(f"{run} trains task {recipe.model.task}; only causal-lm generates text")
    step = chosen_step(run, request.step)
    exported = run.summary.exists() and read_json(run.summary)["steps"] == step
    if (
        request.step is None and exported and (run.export / "config.json").exists()
    ):  # adapters alone have none
        return run.export, None, learned_chats(recipe)
    return folder, step, learned_chats(recipe)


def learned_chats(recipe: Recipe) -> bool:
    """Whether any of its training is on chats."""
    return any(is_chat(part.source) for part in recipe.data.parts)


def _run_learned_chats(model: Path) -> bool | None:
    """The same of the run in whose folder an export lies; None: it lies in none."""
    for folder in model.absolute().parents[:_ABOVE]:
        run = RunDir(folder)
        if run.plan.exists() and run.recipe.exists():
            return learned_chats(read_resolved(run.recipe))
    return None


def _require_causal(folder: Path) -> Path:
    config = folder / "config.json"
    if not config.exists():
        raise InputError(
            f"{folder} is no folder of a run (plan.json), nor of a model of transformers' (config.json)"
        )
    classes = read_json(config).get("architectures") or []
    if not any(name.endswith(_CAUSAL) for name in classes):
        raise InputError(
            f"{folder} holds a {', '.join(classes) or 'model of no class'}; only causal models generate text"
        )
    return folder

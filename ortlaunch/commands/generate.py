"""`ortlaunch generate`: which model goes on with a prompt, and the process that does it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from ortlaunch import start
from ortlaunch.commands.export import chosen_step
from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe, read_resolved
from ortlaunch.recipe.fields.data import is_chat
from ortlaunch.run_folder.folder import RunDir, read_json
from ortlaunch.run_folder.held import held

_ABOVE = 2  # folders from RUN/exports/step_N up to RUN
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how transformers' classes of such models end


class Asked(NamedTuple):
    """What was typed."""

    model: Path
    """Folder of a run, or of a model."""
    prompt: str
    step: int | None
    tokens: int
    temperature: float
    """0: the likeliest token each time."""
    seed: int
    raw: bool
    """Without the chat template."""


def generate(asked: Asked) -> int:
    """Print the prompt and what follows; returns the exit status of the process that does it.

    Raises:
        InputError: there is no such model, or it does not generate text.
    """
    model, step, chats = _source(asked)
    with contextlib.ExitStack() as stack:
        if step is not None:
            run = RunDir(model)
            step = stack.enter_context(held(run, lambda: chosen_step(run, asked.step)))
        return _generate(asked, model, step, chats)


def _generate(asked: Asked, model: Path, step: int | None, chats: bool | None) -> int:
    print(f"model: {model if step is None else RunDir(model).checkpoint(step)}", file=sys.stderr, flush=True)
    given = {**asked._asdict(), "model": str(model), "step": step, "chats": False if asked.raw else chats}
    return start.run("ortlaunch.worker.export.generate", json.dumps(given))


def _source(asked: Asked) -> tuple[Path, int | None, bool | None]:
    """A model's folder and None, or a run's and the step of a checkpoint; and whether it learned chats, if known."""
    run = RunDir(asked.model)
    if not (run.plan.exists() and run.recipe.exists()):
        if asked.step is not None:
            raise InputError(f"--step: {asked.model} is no folder of a run, and has no checkpoints")
        return _require_causal(asked.model), None, _run_learned_chats(asked.model)
    recipe = read_resolved(run.recipe)
    if recipe.model.traits.predicts != "next":
        raise InputError(f"{run} trains task {recipe.model.task}; only causal-lm generates text")
    step = chosen_step(run, asked.step)
    exported = run.summary.exists() and read_json(run.summary)["steps"] == step
    if asked.step is None and exported and (run.export / "config.json").exists():  # adapters alone have none
        return run.export, None, learned_chats(recipe)
    return asked.model, step, learned_chats(recipe)


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
        raise InputError(f"{folder} is no folder of a run (plan.json), nor of a model of transformers' (config.json)")
    classes = read_json(config).get("architectures") or []
    if not any(name.endswith(_CAUSAL) for name in classes):
        raise InputError(
            f"{folder} holds a {', '.join(classes) or 'model of no class'}; only causal models generate text"
        )
    return folder

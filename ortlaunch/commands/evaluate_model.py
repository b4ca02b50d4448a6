"""`ortlaunch evaluate MODEL`: choose the recipe for an exported model, and start the evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe, load, to_yaml
from ortlaunch.recipe.fields.held_out import no_evaluation
from ortlaunch.resolve.shipped import locate
from ortlaunch.run_folder.folder import RunDir

# Folders from RUN/exports/step_N_onnx/model.onnx up to RUN.
_ABOVE = 3
# Settings of training, sharding and casting have no effect on an exported model.
_ALONE = (
    "engine.name=eager",
    "zero=null",
    "precision=fp32",
    "model.lora=null",
    "model.gradient_checkpointing=false",
)


def is_model(path: Path) -> bool:
    """Whether the path is a model.onnx, or a folder of a model and not of a run."""
    if path.suffix == ".onnx":
        return True
    run = RunDir(path)
    of_run = run.plan.exists() and run.recipe.exists()
    return not of_run and any(
        (path / name).exists() for name in ("model.onnx", "config.json", "adapter_config.json")
    )


def evaluate(model: Path, recipe: Path | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Measure a model, and return the exit status of the process that does it.

    Args:
        recipe: a recipe with the evaluation corpus and the task; None: that of the run which
            contains the model.

    Raises:
        InputError: the model does not exist, or has no recipe or no evaluation data.
    """
    model = _file(model)
    run = None if recipe else _run_of(model)
    source = run.recipe if run else locate(recipe or Path())
    modules = Plan.read(run.plan).modules if run else str(source.parent.absolute())
    resolved = to_yaml(_recipe(source, model, overrides))
    return tasks.run_task_alone(
        tasks.ModelEvaluationRequest(str(model), resolved, modules, as_json)
    )


def _file(model: Path) -> Path:
    """Return the model.onnx, or the folder in transformers' format."""
    if not model.exists():
        raise InputError(f"no such file or folder: {model}")
    if model.is_dir() and (model / "model.onnx").exists():
        return model / "model.onnx"
    if model.is_dir() and not (model / "config.json").exists():
        raise InputError(
            f"{model} contains only adapters; evaluate the run, or an export with model.lora.merge"
        )
    return model


def _run_of(model: Path) -> RunDir:
    """Return the run whose folder contains a model."""
    for folder in model.absolute().parents[:_ABOVE]:
        run = RunDir(folder)
        if run.plan.exists() and run.recipe.exists():
            return run
    raise InputError(
        f"{model} is not in a run folder, so the task and data.evaluation are unknown; give a "
        "recipe with --recipe"
    )


def _recipe(source: Path, model: Path, overrides: tuple[str, ...]) -> Recipe:
    folder = model if model.is_dir() else model.parent
    words = list(_ALONE)
    # The exported tokenizer is the one that the model was trained with.
    if (folder / "tokenizer_config.json").exists():
        words.append(f"data.tokenizer={json.dumps(str(folder.absolute()))}")
    if model.is_dir():
        words += [f"model.pretrained={json.dumps(str(model.absolute()))}", "model.config=null"]
    recipe = load(source, (*words, *overrides)).recipe
    if recipe.data.evaluation is None:
        raise InputError(no_evaluation(source, recipe.data))
    if recipe.model.traits.is_own:
        raise InputError(
            f"{source}: the model is built by model.factory; use evaluate RUN for its checkpoints"
        )
    return recipe

"""`ortlaunch export`: a checkpoint as a model.

One process on the CPU builds the run's model and reads only the weights of the checkpoint, which
may be of any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.errors import CheckpointError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.export_records import DeviceArtifacts, ExportLine, OnnxCheck
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.records import as_json
from ortlaunch.tasks import ExportRequest

if TYPE_CHECKING:
    from ortlaunch.recipe import Recipe
    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.model.model import LossModule


def run(request: ExportRequest) -> None:
    """Write the requested export."""
    run, step, folder, form, lora, automatic = request
    write(RunDir(run), step, Path(folder), form, lora, automatic)
    print(f"export of step {request.step}: {request.folder}")


def write(
    run: RunDir, step: int, folder: Path, form: str, lora: str = "", automatic: bool = False
) -> None:
    """Build the model of a run, load the weights of a checkpoint, and write the export.

    Args:
        run: the folder of the run.
        step: the step of the checkpoint.
        folder: the folder to write; it exists afterwards only if the export is complete.
        form: the format, a key of `FORMATS`.
        lora: merged, alone, or "" for the recipe's setting.
        automatic: whether `checkpoint.export` requested it.
    """
    from ortlaunch.worker.device.artifacts import as_on_a_device
    from ortlaunch.worker.export.export import FORMATS

    recipe = _with_adapters(_recipe(run), form, lora)
    if form == "ondevice":
        recipe = as_on_a_device(recipe, Plan.read(run.plan).batch.micro_samples)
    recipe, model, data = trained(run, step, recipe)
    partial = folder.with_name(f"{folder.name}.partial")
    # An earlier export may have been killed.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        found = FORMATS[form](recipe, partial, model, data)
    # BaseException: an interrupt must not leave a partial folder either.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    check = found if isinstance(found, OnnxCheck) else None
    # Recorded first: after a kill in between the next start repeats a missing export, but it would
    # take a folder without a line for the user's own.
    _print_line(run, ExportLine(step, form, str(folder.absolute()), check, automatic))
    partial.replace(folder)
    if isinstance(found, DeviceArtifacts):
        print_device_artifacts(found)


def trained(
    run: RunDir, step: int, recipe: Recipe | None = None
) -> tuple[Recipe, LossModule, LoadedData]:
    """Return recipe, model with the weights of a checkpoint, and data of a run, on the CPU.

    Args:
        run: the folder of the run.
        step: the step of the checkpoint.
        recipe: a recipe in place of the run's.

    Raises:
        CheckpointError: the checkpoint is damaged or gone, or the frozen weights have changed.
    """
    import torch

    from ortlaunch.user_modules import add_factory_folders_to_path
    from ortlaunch.worker.checkpoint.restore import load_weights
    from ortlaunch.worker.checkpoint.verify import damage
    from ortlaunch.worker.data import load_data
    from ortlaunch.worker.data.vocabulary import of_run
    from ortlaunch.worker.model.identity import of_frozen
    from ortlaunch.worker.model.model import build_model
    from ortlaunch.worker.model.precision import dtype_of
    from ortlaunch.worker.process_group.distributed import DistributedContext

    recipe = recipe or _recipe(run)
    plan = Plan.read(run.plan)
    add_factory_folders_to_path(recipe, Path(plan.modules))
    # One process in place of the run's ranks.
    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    # A lock normally keeps the checkpoint; a disk may have no locks (run_folder/held.py).
    if not (run.checkpoint_folder(step) / COMPLETE).exists():
        raise CheckpointError(
            f"{run.checkpoint_folder(step)} was removed by its run in the meantime (checkpoint.keep); "
            "try again"
        )
    if wrong := damage(run.checkpoint_folder(step), alone):
        raise CheckpointError(f"{run.checkpoint_folder(step)} is damaged: {wrong}")
    data = load_data(recipe, alone, vocabulary=of_run(run))
    model = build_model(recipe, data)
    require_same_frozen(run.checkpoint_folder(step), of_frozen(model))
    load_weights(run.checkpoint_folder(step), model)
    # DeepSpeed keeps the model in this precision, and so does the run's own export.
    if plan.deepspeed:
        model.to(dtype_of(recipe.precision))
    return recipe, model, data


def _with_adapters(recipe: Recipe, form: str, lora: str) -> Recipe:
    """Return the recipe with the requested export of adapters (merged or alone).

    Raises:
        InputError: the recipe has no adapters, or the format does not support the request.
    """
    if not lora:
        return recipe
    if recipe.model.lora is None:
        raise InputError(f"--lora {lora}: the run has no adapters; its recipe has no model.lora")
    if form == "ondevice" or (form == "onnx" and lora == "alone"):
        told = "separate adapters, for training" if form == "ondevice" else "adapters merged"
        raise InputError(f"--lora {lora}: --format {form} has {told}; leave --lora out")
    model = recipe.model.model_copy(
        update={"lora": recipe.model.lora.model_copy(update={"merge": lora == "merged"})}
    )
    return recipe.model_copy(update={"model": model})


def _recipe(run: RunDir) -> Recipe:
    from ortlaunch.recipe import read_resolved

    return read_resolved(run.recipe)


def require_same_frozen(folder: Path, now: str | None) -> None:
    """Check that the frozen weights, which a checkpoint lacks, are still those of its training.

    Raises:
        CheckpointError: the frozen weights have changed.
    """
    # A checkpoint without such a record passes.
    then = (origin.read_checkpoint_origin(folder) or {}).get("weights", {}).get("frozen", now)
    if then != now:
        raise CheckpointError(
            f"{folder} contains only the trained weights, and the others (under LoRA all but "
            "the adapters) differ from those of its training: model.pretrained, the seed or a "
            "package has changed since"
        )


def _print_line(run: RunDir, line: ExportLine) -> None:
    """Append the export to exports.jsonl, and print the comparison with PyTorch."""
    append_json_line(run.exports, as_json(line))
    if line.onnx is not None:
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in line.onnx.batches)
        print(f"model.onnx: {', '.join(line.onnx.inputs)} -> {', '.join(line.onnx.outputs)}")
        print(
            "onnxruntime's outputs differ from PyTorch's by at most "
            f"{line.onnx.largest_difference:.2g} (limit "
            f"{line.onnx.limit:g}) on batches of {shapes}"
        )


def print_device_artifacts(found: DeviceArtifacts) -> None:
    """Print the comparison with PyTorch, the trained weights, and differences from the recipe."""
    trained = sum(each.trained for each in found.parameters)
    difference = found.largest_difference
    print(
        f"onnxruntime's loss and logits differ from PyTorch's by at most {difference:.2g} (limit "
        f"{found.limit:g})"
    )
    print(
        f"a device trains {trained} of {len(found.parameters)} weights by ONNX Runtime's "
        f"{found.optimizer}"
    )
    for note in found.notes:
        print(note)

"""`ortlaunch export`: a checkpoint as a model.

One process on the CPU builds the run's model and reads only the weights of the checkpoint, which
may be of any number of ranks and any ZeRO stage.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.export_records import DeviceArtifacts, ExportLine, OnnxCheck
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.tables.tasks import ExportRequest

if TYPE_CHECKING:
    from ortlaunch.recipe import Recipe
    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.model.model import LossModule
    from ortlaunch.worker.weight_memory import WeightMemory


def run(request: ExportRequest) -> None:
    """Write the requested export."""
    run, step, folder, export_format, lora_form, is_automatic = request
    write_and_record_checkpoint_export(
        RunDir(run), step, Path(folder), export_format, lora_form, is_automatic
    )
    print(f"export of step {request.step}: {request.folder}")


def write_and_record_checkpoint_export(
    run: RunDir,
    checkpoint_step: int,
    export_folder: Path,
    export_format: str,
    lora_form: str = "",
    is_automatic: bool = False,
) -> None:
    """Build the model of a run, load the weights of a checkpoint, and write the export.

    Args:
        run: the folder of the run.
        checkpoint_step: the step of the checkpoint.
        export_folder: the folder to write; it exists afterwards only if the export is complete.
        export_format: the format, a key of `FORMATS`.
        lora_form: merged, alone, or "" for the recipe's setting.
        is_automatic: whether `checkpoint.export` requested it.
    """
    from ortlaunch.worker.device.artifacts import unsharded_one_pass_recipe_for_device
    from ortlaunch.worker.export.export import FORMATS, apply_umask_and_flush_files
    from ortlaunch.worker.weight_memory import WeightMemory

    recipe = _recipe_with_requested_lora_form(_read_run_recipe(run), export_format, lora_form)
    if export_format == "ondevice" and recipe.model.quantize:
        raise InputError(
            "--format ondevice: ONNX Runtime does not train beside the quantized weights of "
            "model.quantize; use --format huggingface or onnx, which have whole weights"
        )
    if export_format == "ondevice":
        recipe = unsharded_one_pass_recipe_for_device(
            recipe, Plan.read(run.plan).batch.micro_samples
        )
    partial = export_folder.with_name(f"{export_folder.name}.partial")
    # An earlier export may have been killed.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        # A training on the device, and a graph, have the weights in memory.
        weight_memory = WeightMemory(partial) if export_format == "huggingface" else None
        recipe, model, data = load_recipe_trained_model_and_data_of_checkpoint(
            run, checkpoint_step, recipe, weight_memory
        )
        result = FORMATS[export_format](recipe, partial, model, data)
        apply_umask_and_flush_files(partial)
    # BaseException: an interrupt must not leave a partial folder either.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    check = result if isinstance(result, OnnxCheck) else None
    # Recorded first: after a kill in between the next start repeats a missing export, but it would
    # take a folder without a line for the user's own.
    _record_and_print_export(
        run,
        ExportLine(
            checkpoint_step, export_format, str(export_folder.absolute()), check, is_automatic
        ),
    )
    partial.replace(export_folder)
    if isinstance(result, DeviceArtifacts):
        print_device_artifacts_summary(result)


def load_recipe_trained_model_and_data_of_checkpoint(
    run: RunDir,
    checkpoint_step: int,
    recipe: Recipe | None = None,
    weight_memory: WeightMemory | None = None,
) -> tuple[Recipe, LossModule, LoadedData]:
    """Return recipe, model with the weights of a checkpoint, and data of a run, on the CPU.

    Args:
        run: the folder of the run.
        checkpoint_step: the step of the checkpoint.
        recipe: a recipe in place of the run's.
        weight_memory: keeps the weights; None: memory does.

    Raises:
        CheckpointError: the checkpoint is damaged or gone, or the frozen weights have changed.
    """
    import torch

    from ortlaunch.user_modules import append_factory_folders_to_sys_path
    from ortlaunch.worker.checkpoint.restore import load_weights_and_buffers_into_unsharded_model
    from ortlaunch.worker.checkpoint.verify import gather_checkpoint_damage_or_empty
    from ortlaunch.worker.data import load_data_and_print_notes
    from ortlaunch.worker.data.vocabulary import read_run_vocabulary_or_none
    from ortlaunch.worker.model.identity import frozen_weights_fingerprint_or_none
    from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
    from ortlaunch.worker.model.precision import dtype_of
    from ortlaunch.worker.process_group.distributed import DistributedContext

    recipe = recipe or _read_run_recipe(run)
    plan = Plan.read(run.plan)
    append_factory_folders_to_sys_path(recipe, Path(plan.modules))
    # One process in place of the run's ranks.
    single_rank = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    # A lock normally keeps the checkpoint; a disk may have no locks (run_folder/checkpoint_hold.py).
    if not (run.checkpoint_folder(checkpoint_step) / COMPLETE).exists():
        raise CheckpointError(
            f"{run.checkpoint_folder(checkpoint_step)} was removed by its run in the meantime (checkpoint.keep); "
            "try again"
        )
    if damage_text := gather_checkpoint_damage_or_empty(
        run.checkpoint_folder(checkpoint_step), single_rank
    ):
        raise CheckpointError(f"{run.checkpoint_folder(checkpoint_step)} is damaged: {damage_text}")
    data = load_data_and_print_notes(
        recipe, single_rank, vocabulary=read_run_vocabulary_or_none(run)
    )
    with weight_memory.keep_registered_parameters() if weight_memory else contextlib.nullcontext():
        model = seed_and_build_loss_module_on_cpu(recipe, data)
    require_unchanged_frozen_weights(
        run.checkpoint_folder(checkpoint_step), frozen_weights_fingerprint_or_none(model)
    )
    load_weights_and_buffers_into_unsharded_model(run.checkpoint_folder(checkpoint_step), model)
    # DeepSpeed keeps the model in this precision, and so does the run's own export.
    if plan.deepspeed:
        if weight_memory is not None:
            weight_memory.cast_and_keep_parameters(model, dtype_of(recipe.precision))
        model.to(dtype_of(recipe.precision))
    return recipe, model, data


def _recipe_with_requested_lora_form(recipe: Recipe, export_format: str, lora_form: str) -> Recipe:
    """Return the recipe with the requested export of adapters (merged or alone).

    Raises:
        InputError: the recipe has no adapters, or the format does not support the request.
    """
    if not lora_form:
        return recipe
    if recipe.model.lora is None:
        raise InputError(
            f"--lora {lora_form}: the run has no adapters; its recipe has no model.lora"
        )
    if export_format == "ondevice" or (export_format == "onnx" and lora_form == "alone"):
        problem = (
            "separate adapters, for training" if export_format == "ondevice" else "adapters merged"
        )
        raise InputError(
            f"--lora {lora_form}: --format {export_format} has {problem}; leave --lora out"
        )
    if lora_form == "alone" and recipe.model.lora.init.startswith(("pissa", "olora")):
        raise InputError(
            f"--lora alone: model.lora.init {recipe.model.lora.init} has changed the base weights, so that "
            "adapters alone do not fit the published ones; leave --lora out"
        )
    model = recipe.model.model_copy(
        update={"lora": recipe.model.lora.model_copy(update={"merge": lora_form == "merged"})}
    )
    return recipe.model_copy(update={"model": model})


def _read_run_recipe(run: RunDir) -> Recipe:
    from ortlaunch.recipe import read_resolved_recipe_of_run

    return read_resolved_recipe_of_run(run.recipe)


def require_unchanged_frozen_weights(
    checkpoint_folder: Path, current_fingerprint: str | None
) -> None:
    """Check that the frozen weights, which a checkpoint lacks, are still those of its training.

    Raises:
        CheckpointError: the frozen weights have changed.
    """
    # A checkpoint without such a record passes.
    saved_fingerprint = (
        (origin.read_checkpoint_origin_or_none(checkpoint_folder) or {})
        .get("weights", {})
        .get("frozen", current_fingerprint)
    )
    if saved_fingerprint != current_fingerprint:
        raise CheckpointError(
            f"{checkpoint_folder} contains only the trained weights, and the others (under LoRA all but "
            "the adapters) differ from those of its training: model.pretrained, the seed or a "
            "package has changed since"
        )


def _record_and_print_export(run: RunDir, export_line: ExportLine) -> None:
    """Append the export to exports.jsonl, and print the comparison with PyTorch."""
    append_json_line(run.exports, json_values_of_record(export_line))
    if export_line.onnx is not None:
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in export_line.onnx.batches)
        print(
            f"model.onnx: {', '.join(export_line.onnx.inputs)} -> {', '.join(export_line.onnx.outputs)}\n"
            "onnxruntime's outputs differ from PyTorch's by at most "
            f"{export_line.onnx.largest_difference:.2g} (limit "
            f"{export_line.onnx.limit:g}) on batches of {shapes}"
        )


def print_device_artifacts_summary(artifacts: DeviceArtifacts) -> None:
    """Print the comparison with PyTorch, the trained weights, and differences from the recipe."""
    trained = sum(parameter.trained for parameter in artifacts.parameters)
    print(
        "onnxruntime's loss and logits differ from PyTorch's by at most "
        f"{artifacts.largest_difference:.2g} (limit {artifacts.limit:g})",
        f"a device trains {trained} of {len(artifacts.parameters)} weights by ONNX Runtime's "
        f"{artifacts.optimizer}",
        *artifacts.notes,
        sep="\n",
    )

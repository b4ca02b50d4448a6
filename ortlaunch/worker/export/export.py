"""The trained model in common formats: a transformers folder, or safetensors for custom models."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.export_records import DeviceArtifacts, OnnxCheck
from ortlaunch.run_folder.file_sums import list_files_below
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.data.media.samples import load_media_processor_or_none
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.export.sentence_transformers_files import write_sentence_transformers_files
from ortlaunch.worker.model.adapters import merge_adapters
from ortlaunch.worker.model.model import LossModule, restore_cache_setting
from ortlaunch.worker.patching import hide_package_unless_loaded
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.weight_memory import WeightMemory


def write_final_run_export_on_rank_0(
    recipe: Recipe,
    run: RunDir,
    group: DistributedContext,
    stepper: Stepper,
    trained_module: LossModule,
    data: LoadedData,
) -> None:
    """Write weights, config and tokenizer into export/ (collective).

    The model cannot be trained further afterwards, as LoRA may be merged into it.
    """
    # All ranks take part, as each may have only pieces of the weights (ZeRO 3); rank 0 writes.
    weight_memory = WeightMemory(run.path)
    with stepper.gather_whole_weights(weight_memory):
        if group.rank == 0:
            run.export.mkdir(parents=True, exist_ok=True)
            try:
                write_transformers_or_peft_folder(
                    recipe, run.export, trained_module, data, weight_memory
                )
                apply_umask_and_flush_files(run.export)
            # safetensors has an error of its own for a full disk, which names no file.
            except Exception as error:
                if "os error 28" not in str(error):
                    raise
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.export))
                raise full from error
    group.barrier()


def write_transformers_or_peft_folder(
    recipe: Recipe,
    export_folder: Path,
    trained_module: LossModule,
    data: LoadedData,
    weight_memory: WeightMemory | None = None,
) -> None:
    """Write the model for transformers or peft into an existing folder.

    A model without `save_pretrained` is written as model.safetensors. New weights, such as merged
    ones, go to `weight_memory`.
    """
    model: Any = trained_module.model
    weight_memory = weight_memory or WeightMemory(export_folder)
    if recipe.model.lora and recipe.model.lora.merge:
        model = merge_adapters(model, weight_memory)
    elif recipe.model.lora:
        # peft would write a template over the user's own model card; push.py writes the run's card.
        model.create_or_update_model_card = lambda export_folder: None
    if hasattr(model, "save_pretrained"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        restore_cache_setting(model, trained_module.generates_with_cache)
        # accelerate would import DeepSpeed, for seconds, to see whether the model is wrapped by it.
        with hide_package_unless_loaded("deepspeed"), weight_memory.keep_converted_weights():
            model.save_pretrained(export_folder)
        write_sentence_transformers_files(recipe, export_folder, model)
    else:
        _save_safetensors_with_shared_tensors_once(model, str(export_folder / "model.safetensors"))
    for part in (data.tokenizer, load_media_processor_or_none(recipe)):
        if part is not None:
            part.save_pretrained(export_folder)


def _write_and_check_onnx_export(
    recipe: Recipe, export_folder: Path, trained_module: LossModule, data: LoadedData
) -> OnnxCheck:
    from ortlaunch.worker.onnx.onnx_export import write_and_check_onnx_folder

    return write_and_check_onnx_folder(recipe, export_folder, trained_module, data)


def _write_and_check_device_artifacts(
    recipe: Recipe, export_folder: Path, trained_module: LossModule, data: LoadedData
) -> DeviceArtifacts:
    from ortlaunch.worker.device.artifacts import write_and_check_device_artifacts

    return write_and_check_device_artifacts(recipe, export_folder, trained_module, data)


FORMATS: dict[
    str, Callable[[Recipe, Path, LossModule, LoadedData], OnnxCheck | DeviceArtifacts | None]
] = {
    "huggingface": write_transformers_or_peft_folder,
    "onnx": _write_and_check_onnx_export,
    "ondevice": _write_and_check_device_artifacts,
}
"""Writers by the value of `ortlaunch export --format`; api/export.py has the same names."""


def apply_umask_and_flush_files(folder: Path) -> None:
    """Give all files of a folder the permissions of the umask, and flush them to the disk."""
    # safetensors writes files that only their owner can read. The umask can be read only by setting
    # it.
    umask = os.umask(0o077)
    os.umask(umask)
    for path in list_files_below(folder):
        path.chmod(0o666 & ~umask)
        # A summary or a folder's final name promises the files, also after a power failure.
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _save_safetensors_with_shared_tensors_once(model: torch.nn.Module, file_path: str) -> None:
    """Write a file for safetensors' `load_model`, with each shared tensor once."""
    # safetensors' own `save_model` refuses weights that ZeRO keeps as pieces of one large tensor.
    from safetensors.torch import save_file

    name_by_tensor: dict[object, str] = {}
    metadata = {"format": "pt"}
    tensors = {}
    for name, value in model.state_dict().items():
        # Empty tensors have no address of their own.
        tensor_key = (
            (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        )
        stored_name = name_by_tensor.setdefault(tensor_key, name)
        if stored_name == name:
            tensors[name] = value.contiguous()
        else:
            # `load_model` finds the stored name of a shared tensor here.
            metadata[name] = stored_name
    save_file(tensors, file_path, metadata)

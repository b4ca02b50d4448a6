"""The trained model in the form that others read: transformers' folder, or safetensors for the user's own model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.export_records import DeviceArtifacts, OnnxCheck
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.model.model import LossModule, give_back_cache
from ortlaunch.worker.process_group.distributed import DistributedContext


def export(
    recipe: Recipe,
    run: RunDir,
    group: DistributedContext,
    stepper: Stepper,
    trained: LossModule,
    data: LoadedData,
) -> None:
    """Write export/ (collective): weights, config and tokenizer. The model is of no further use: LoRA is merged."""
    with stepper.whole_weights():
        if group.rank == 0:
            run.export.mkdir(parents=True, exist_ok=True)
            huggingface(recipe, run.export, trained, data)
    group.barrier()


def huggingface(recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData) -> None:
    """What transformers (or peft) loads, or safetensors where the model is the user's own, into an existing folder."""
    model: Any = trained.model
    if recipe.model.lora and recipe.model.lora.merge:
        model = model.merge_and_unload(safe_merge=True)
    elif (
        recipe.model.lora
    ):  # peft's card is a template, written over one of the user's; push.py writes the run's
        model.create_or_update_model_card = lambda folder: None
    if hasattr(model, "save_pretrained"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        give_back_cache(model, trained.generates_with_cache)
        model.save_pretrained(folder)
    else:
        _save_tensors(model, str(folder / "model.safetensors"))
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(folder)
    follow_umask(folder)


def _onnx(recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData) -> OnnxCheck:
    from ortlaunch.worker.onnx.onnx_export import onnx

    found = onnx(recipe, folder, trained, data)
    follow_umask(folder)
    return found


def _ondevice(
    recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData
) -> DeviceArtifacts:
    from ortlaunch.worker.device.artifacts import ondevice

    found = ondevice(recipe, folder, trained, data)
    follow_umask(folder)
    return found


FORMATS: dict[
    str, Callable[[Recipe, Path, LossModule, LoadedData], OnnxCheck | DeviceArtifacts | None]
] = {
    "huggingface": huggingface,
    "onnx": _onnx,
    "ondevice": _ondevice,
}
"""What `ortlaunch export --format` writes; the names are commands/export.py's, too."""


def follow_umask(folder: Path) -> None:
    """Safetensors writes files for their owner alone; as all others they should be the umask's."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def _save_tensors(model: torch.nn.Module, path: str) -> None:
    """What safetensors' `load_model` reads, each shared tensor once.

    Not by its `save_model`, which refuses weights that ZeRO keeps as pieces of one large tensor.
    """
    from safetensors.torch import save_file

    kept: dict[object, str] = {}
    metadata = {"format": "pt"}
    tensors = {}
    for name, value in model.state_dict().items():
        place = (
            (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        )
        first = kept.setdefault(place, name)
        if first == name:
            tensors[name] = value.contiguous()
        else:
            metadata[name] = first
    save_file(tensors, path, metadata)

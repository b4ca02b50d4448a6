"""The trained model in the form that others read: transformers' folder, or safetensors for the user's own model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.model import LossModule, set_use_cache
from ortlaunch.worker.stepping import Stepper


def export(
    recipe: Recipe, run: RunDir, group: DistributedContext, stepper: Stepper, trained: LossModule, tokenizer: Any
) -> None:
    """Write export/ (collective): weights, config and tokenizer. The model is of no further use: LoRA is merged."""
    with stepper.whole_weights():
        if group.rank == 0:
            run.export.mkdir(parents=True, exist_ok=True)
            huggingface(recipe, run.export, trained, tokenizer)
    group.barrier()


def huggingface(recipe: Recipe, folder: Path, trained: LossModule, tokenizer: Any) -> None:
    """What transformers (or peft) loads, or safetensors where the model is the user's own, into an existing folder."""
    model: Any = trained.model
    if recipe.model.lora and recipe.model.lora.merge:
        model = model.merge_and_unload(safe_merge=True)
    if hasattr(model, "save_pretrained"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        _give_back_cache(model, trained.generates_with_cache)
        model.save_pretrained(folder)
    else:
        _save_tensors(model, str(folder / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _follow_umask(folder)


FORMATS: dict[str, Callable[[Recipe, Path, LossModule, Any], None]] = {"huggingface": huggingface}
"""What `ortlaunch export --format` writes; the names are run/export.py's, too."""


def _follow_umask(folder: Path) -> None:
    """Safetensors writes files for their owner alone; as all others they should be the umask's."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def _give_back_cache(model: Any, own: bool | None) -> None:
    """The model's own `use_cache`, which training had switched off."""
    config = getattr(model, "config", None)
    if config is not None and own is not None:
        set_use_cache((config, config.get_text_config()), own)


def _save_tensors(model: torch.nn.Module, path: str) -> None:
    """What safetensors' `load_model` reads, each shared tensor once.

    Not by its `save_model`, which refuses weights that ZeRO keeps as pieces of one large tensor.
    """
    from safetensors.torch import save_file

    kept: dict[object, str] = {}
    metadata, tensors = {"format": "pt"}, {}
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        first = kept.setdefault(place, name)
        if first == name:
            tensors[name] = value.contiguous()
        else:
            metadata[name] = first
    save_file(tensors, path, metadata)

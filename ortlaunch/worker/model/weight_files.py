"""Pretrained weights that are read one by one, so that no process holds all of a divided model.

Rank 0 reads each parameter from the file when FSDP2 divides it (fsdp.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortlaunch.recipe import Recipe
from ortlaunch.tables.families import FAMILIES
from ortlaunch.worker.patching import replace_attribute_temporarily


@dataclass(frozen=True)
class WeightFiles:
    """The files of a folder that has every parameter of a model, under its name and in its shape."""

    file_by_name: dict[str, Path]

    def read_parameter(self, name: str) -> torch.Tensor:
        """Return the values of a parameter, in the type of the file."""
        from safetensors import safe_open

        with safe_open(self.file_by_name[name], framework="pt") as file:
            values: torch.Tensor = file.get_tensor(name)
        return values


def may_weights_be_read_later(recipe: Recipe, model_type: str) -> bool:
    """Return whether nothing but the division over ranks needs the values of pretrained weights.

    Adapters are made beside them, a checkpoint has a fingerprint of frozen ones, and a new head has
    values of its own. Documents in one sample, and a chunked loss of a model that no test trains, are
    tried in a pass.
    """
    settings = recipe.model
    needs_values = settings.lora or settings.freeze or settings.quantize or settings.allow_partial
    needs_pass = recipe.data.separates_documents or model_type not in FAMILIES
    return bool(settings.pretrained) and not (
        needs_values or needs_pass or settings.traits.has_new_head
    )


@contextlib.contextmanager
def build_parameters_without_memory() -> Iterator[None]:
    """Let modules that are built have parameters on the meta device, and buffers with values."""
    register: Any = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied one is registered again.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with replace_attribute_temporarily(nn.Module, "register_parameter", register_on_meta):
        yield


def weight_files_or_none(model: nn.Module, folder: Path) -> WeightFiles | None:
    """Return the files of a model's weights; None where transformers would change or miss some.

    Args:
        model: a model of transformers.
        folder: a folder with its weights, or the name of a model on the hub.
    """
    from safetensors import safe_open

    if _are_weights_converted(model):
        return None
    file_by_name, shape_by_name = {}, {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                file_by_name[name] = path
                shape_by_name[name] = tuple(file.get_slice(name).get_shape())
    state_names = model.state_dict().keys()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tied_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    has_all = all(shape_by_name.get(name) == shape for name, shape in shapes.items())
    # Neither saved buffers nor weights that the model lacks.
    has_no_others = tied_names == {*state_names} and tied_names >= shape_by_name.keys()
    return WeightFiles(file_by_name) if has_all and has_no_others else None


def _are_weights_converted(model: nn.Module) -> bool:
    """Return whether transformers stores the weights of this model in another form."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    # Before version 5 there were no conversions.
    except ImportError:
        return False
    config: Any = model.config
    names = (type(model).__name__, config.model_type)
    return any(get_checkpoint_conversion_mapping(name) for name in names)

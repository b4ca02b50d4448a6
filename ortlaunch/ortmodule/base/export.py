"""One export: what ORT hands to it, and what its steps find out and leave for later passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlaunch.ortmodule.base.ort_types import ExportInfo, Kwargs, RuntimeOptions, Transition


Facts = dict[str, Any]
"""What a trace of a model showed, by name."""


class Export(NamedTuple):
    """ORT's arguments of an export, by the names that they have here."""

    module: nn.Module
    """The model with tensors alone for inputs, as ORT traces it."""
    training: bool
    device: torch.device
    inputs: Sequence[torch.Tensor]
    info: ExportInfo
    """ORT's ModelInfoForExport."""
    options: RuntimeOptions
    """ORT's _RuntimeOptions of this module; settings.settings_of reads ours."""
    seen: Facts
    """What a trace of the model showed beside the graph."""


def export_of(arguments: Kwargs) -> Export:
    """Of the arguments of ORT's `_export_model` or `_get_exported_model`."""
    transition = arguments["stage3_param_handle"]
    info = arguments["model_info_for_export"]
    return Export(
        arguments["flattened_module"],
        info.export_mode == torch.onnx.TrainingMode.TRAINING,
        arguments["device"],
        arguments["flatten_module_inputs"],
        info,
        transition._runtime_options,
        seen_of(transition),
    )


def seen_of(transition: Transition) -> Facts:
    """What the newest trace of a GraphTransitionManager's model showed."""
    found: Facts = vars(transition).setdefault("_ortlaunch_traced", {})
    return found

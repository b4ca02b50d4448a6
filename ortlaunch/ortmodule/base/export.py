"""One export: ORT's arguments, and the facts that its steps record for later passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlaunch.ortmodule.base.ort_types import (
        ExportInfo,
        GraphTransitionManager,
        Kwargs,
        RuntimeOptions,
    )


Facts = dict[str, Any]
"""Facts that a trace of a model showed, by name."""


class Export(NamedTuple):
    """ORT's arguments of an export, by ortmodule's names for them."""

    module: nn.Module
    """The model with tensors as its only inputs, as ORT traces it."""
    training: bool
    device: torch.device
    inputs: Sequence[torch.Tensor]
    info: ExportInfo
    """ORT's ModelInfoForExport."""
    options: RuntimeOptions
    """ORT's _RuntimeOptions of this module; settings.attached_settings returns the Settings in it."""
    facts: Facts
    """Facts that a trace of the model showed, beside the graph."""


def export_from_arguments(arguments: Kwargs) -> Export:
    """Return the Export for the arguments of ORT's `_export_model` or `_get_exported_model`."""
    # ORT passes its GraphTransitionManager (`self`) under this name, because it keeps ZeRO stage
    # 3's parameters.
    graph_manager = arguments["stage3_param_handle"]
    info = arguments["model_info_for_export"]
    return Export(
        arguments["flattened_module"],
        info.export_mode == torch.onnx.TrainingMode.TRAINING,
        arguments["device"],
        arguments["flatten_module_inputs"],
        info,
        graph_manager._runtime_options,
        facts_of_last_trace(graph_manager),
    )


def facts_of_last_trace(graph_manager: GraphTransitionManager) -> Facts:
    """Return the facts of the newest trace of a GraphTransitionManager's model."""
    facts: Facts = vars(graph_manager).setdefault("_ortlaunch_traced", {})
    return facts


def path_in_model(path_in_wrapper: str) -> str:
    """Return a path in the model itself, without the first part, which ORT's wrapper adds."""
    return path_in_wrapper.partition(".")[2]

"""One export: ORT's arguments, and the facts that its steps record for later passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortmodule._internal.base.ort_types import (
        ExportInfo,
        GraphTransitionManager,
        Kwargs,
        RuntimeOptions,
    )


TraceFacts = dict[str, Any]
"""Facts that a trace of a model showed, by name."""


class ExportContext(NamedTuple):
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
    facts: TraceFacts
    """Facts that a trace of the model showed, beside the graph."""


def export_context_from_ort_arguments(ort_arguments: Kwargs) -> ExportContext:
    """Return the Export for the arguments of ORT's `_export_model` or `_get_exported_model`."""
    # ORT passes its GraphTransitionManager (`self`) under this name, because it keeps ZeRO stage
    # 3's parameters.
    graph_manager = ort_arguments["stage3_param_handle"]
    info = ort_arguments["model_info_for_export"]
    return ExportContext(
        ort_arguments["flattened_module"],
        info.export_mode == torch.onnx.TrainingMode.TRAINING,
        ort_arguments["device"],
        ort_arguments["flatten_module_inputs"],
        info,
        graph_manager._runtime_options,
        get_or_create_newest_trace_facts(graph_manager),
    )


def get_or_create_newest_trace_facts(graph_manager: GraphTransitionManager) -> TraceFacts:
    """Return the facts of the newest trace of a GraphTransitionManager's model."""
    facts: TraceFacts = vars(graph_manager).setdefault("_ortmodule_traced", {})
    return facts


def path_in_model(path_in_wrapper: str) -> str:
    """Return a path in the model itself, without the first part, which ORT's wrapper adds."""
    return path_in_wrapper.partition(".")[2]

"""One export: ORT's arguments, and the facts that its steps record for later passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ortmodule._internal.base.attached import GraphManagerRecord, OptionsRecord
from ortmodule._internal.base.trace_facts import TraceFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortmodule._internal.base.ort_types import ExportInfo, Kwargs, RuntimeOptions
    from ortmodule._internal.base.settings import Settings


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
    """ORT's _RuntimeOptions of this module."""
    facts: TraceFacts
    """Facts that the newest trace of the model showed, beside the graph."""

    @property
    def settings(self) -> Settings:
        """Return this module's settings."""
        return OptionsRecord.attached_to(self.options).settings


def begin_trace_and_get_export_context(ort_arguments: Kwargs) -> ExportContext:
    """Create the facts of a new trace, and return the context that holds them."""
    GraphManagerRecord.attached_to(ort_arguments["stage3_param_handle"]).trace_facts = TraceFacts()
    return export_context_from_ort_arguments(ort_arguments)


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
        GraphManagerRecord.attached_to(graph_manager).trace_facts,
    )


def path_in_model(path_in_wrapper: str) -> str:
    """Return a path in the model itself, without the first part, which ORT's wrapper adds."""
    return path_in_wrapper.partition(".")[2]

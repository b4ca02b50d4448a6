"""One export: ORT's arguments, and the facts that its steps record for later passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortmodule._internal.base.ort_types import (
        ExportInfo,
        GraphTransitionManager,
        Kwargs,
        RuntimeOptions,
    )

ContainerKeyAndValue = tuple[Any, Any, object]
"""A container, a key or index in it, and the object that replaces the entry there."""


@dataclass
class PythonReads:
    """Lines of the model's code that read values of tensors in Python, as `file:line`."""

    decisions: set[str] = field(default_factory=set)
    """Where a value may choose what the model computes."""
    checks: set[str] = field(default_factory=set)
    """Where a value is only checked, by an assertion or a condition under which the model raises."""
    sizes: set[str] = field(default_factory=set)
    ones: set[str] = field(default_factory=set)
    """Where a size is compared with 0 or 1 only, such as attention of one token."""
    buffers: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    """Where torch's transformer layers check whether a mask is causal."""
    layer_paths: set[str] = field(default_factory=set)
    """Paths of the layers whose code makes decisions."""


@dataclass
class TraceFacts:
    """What one trace of a model showed beside the graph; the steps of its export fill it."""

    python_reads: PythonReads = field(default_factory=PythonReads)
    line_by_value: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The tensors that depend on the batch or on weights, with the line that computed each."""
    kept_entries: list[ContainerKeyAndValue] = field(default_factory=list)
    """Where the pass stored tensors outside its result, and what replaces them there."""
    state_paths: list[tuple[str, str]] = field(default_factory=list)
    """Places of the Python state that the passes read."""
    code_names: set[str] = field(default_factory=set)
    """Names in the code of the passes."""
    reads_grad_mode: bool = False
    has_checkpoints: bool = False
    label_density: float | None = None
    """The share of labels that are not ignored, if the trace left out the others' rows."""
    norm_paths: list[str] = field(default_factory=list)
    """Paths of the BatchNorm layers whose statistics a training pass updates."""


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
    """What the newest trace of the model showed beside the graph."""


def begin_trace_and_get_export_context(ort_arguments: Kwargs) -> ExportContext:
    """Create the facts of a new trace, and return the context that holds them."""
    ort_arguments["stage3_param_handle"]._ortmodule_traced = TraceFacts()
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
        newest_trace_facts(graph_manager),
    )


def newest_trace_facts(graph_manager: GraphTransitionManager) -> TraceFacts:
    """Return the facts of the newest trace of a GraphTransitionManager's model."""
    facts: TraceFacts = vars(graph_manager).setdefault("_ortmodule_traced", TraceFacts())
    return facts


def path_in_model(path_in_wrapper: str) -> str:
    """Return a path in the model itself, without the first part, which ORT's wrapper adds."""
    return path_in_wrapper.partition(".")[2]

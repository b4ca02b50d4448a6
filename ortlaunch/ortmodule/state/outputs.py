"""Outputs of an ORTModule in the dtypes that the model returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import PROCESSED, owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, GraphInfo

_TYPES = "_ortlaunch_types"


def restore_output_dtypes() -> None:
    """Cast outputs to the dtypes that the model returns.

    On a CPU ORT computes float16 in float32, and returned float32 where a model returns float16.
    """
    wrap_method(owner(PROCESSED), "restore_outputs", _typed)


def _typed(original: AnyFunction, info: GraphInfo, outputs: Sequence[torch.Tensor]) -> object:
    # Computed once for a graph: this runs in each pass.
    if not hasattr(info, _TYPES):
        setattr(info, _TYPES, _types(info._post_export_processed_model.graph))
    types = getattr(info, _TYPES)
    return original(
        info, [output.to(kind) if kind else output for output, kind in zip(outputs, types)]
    )


def _types(graph: onnx.GraphProto) -> list[torch.dtype | None]:
    """Return the dtype of each output; None where the exporter does not know it."""
    from onnxruntime.training.utils import onnx_dtype_to_pytorch_dtype

    kinds = [output.type.tensor_type.elem_type for output in graph.output]
    return [onnx_dtype_to_pytorch_dtype(kind) if kind else None for kind in kinds]

"""An ordinary ONNX graph of a model, by torch's TorchScript exporter with this package's exact forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.torch_calls import pause_tracing_and_torch_function
from ortmodule._internal.torch_in_graph.operator_table import (
    wrap_export_with_exact_forms_without_fast_path,
)
from ortmodule._internal.tracing.export_wrappers import wrap_export_restoring_autocast_cache

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

# Forms that are standard ONNX, and that Whisper and MultiheadAttention need.
_STANDARD_FORMS = ("diff", "cumsum", "unflatten")


def export_onnx(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], path: str, **export_settings: object
) -> None:
    """Write a model as ONNX, as `torch.onnx.export(dynamo=False)` does, with fewer faults.

    Cumulative sums of booleans, differences and `unflatten` have forms, torch's fast path of
    attention is off, and a loss of equal shapes does not put its labels into the graph.

    Args:
        model: the model.
        inputs: the tensors of the traced pass.
        path: the file to write.
        export_settings: further arguments of `torch.onnx.export`.
    """
    export = wrap_export_restoring_autocast_cache(
        wrap_export_with_exact_forms_without_fast_path(torch.onnx.export, *_STANDARD_FORMS)
    )
    with replace_attribute_temporarily(
        torch,
        "broadcast_tensors",
        partial(_broadcast_unless_of_equal_shape, torch.broadcast_tensors),
    ):
        export(model, tuple(inputs), path, dynamo=False, **export_settings)


def _broadcast_unless_of_equal_shape(
    original: AnyFunction, *tensors: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Leave tensors of one size as they are.

    A trace would take the result for the scores themselves, so that the graph would need the labels
    with which mse_loss compares them.
    """
    # In a trace sizes are tensors.
    with pause_tracing_and_torch_function():
        shapes = {tensor.shape for tensor in tensors}
    broadcast: Sequence[torch.Tensor] = tensors if len(shapes) == 1 else original(*tensors)
    return broadcast

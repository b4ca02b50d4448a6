"""The chunked loss (worker/model/chunked_loss.py) as a call of torch's operator in ORT's graph.

ORT calls the operator as it calls aten operators. The forward pass also returns the gradients; the
backward pass multiplies them by the gradient of the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal.tracing.symbolics import (
    dtype_of_graph_value,
    wrap_export_with_operator_forms,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortmodule._internal.base.ort_types import AnyFunction

OPERATOR = "ortmodule::head_loss"


def wrap_export_keeping_chunked_loss(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that the operator of a chunked loss stays one call."""
    return wrap_export_with_operator_forms(
        torch_export, lambda: {OPERATOR: _register_gradient_and_write_chunked_loss_call}
    )


def _register_gradient_and_write_chunked_loss_call(
    g: GraphContext,
    hidden_value: torch.Value,
    weight_value: torch.Value,
    *other_inputs: torch.Value,
) -> Sequence[torch.Value]:
    own_dtype = dtype_of_graph_value(hidden_value)
    exact_dtype = torch.promote_types(dtype_of_graph_value(hidden_value), torch.float32)
    _register_chunked_loss_gradient([own_dtype, dtype_of_graph_value(weight_value)])
    outputs = g.op(
        "org.pytorch.aten::ATen",
        hidden_value,
        weight_value,
        *other_inputs,
        operator_s=OPERATOR,
        overload_name_s="",
        outputs=5,
    )
    for output, dtype in zip(
        outputs, (exact_dtype, own_dtype, exact_dtype, exact_dtype, exact_dtype)
    ):
        # The first output, the loss, is a scalar; the sizes of the others are unknown.
        sizes: Any = [] if output is outputs[0] else None
        output.setType(hidden_value.type().with_dtype(dtype).with_sizes(sizes))
    return outputs


def _register_chunked_loss_gradient(hidden_and_weight_dtypes: list[torch.dtype]) -> None:
    """Register the gradient for the current export, with the type codes of its tensors.

    ORT keeps the first registration: a process that has exported in float32 cannot build the graph
    of a float16 model with a chunked loss.
    """
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    module: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    key = f"org.pytorch.aten::ATen::{OPERATOR}::"
    module.register_gradient_definition(
        key, _to_gradient_definition(list(_chunked_loss_gradient_nodes(hidden_and_weight_dtypes)))
    )


# In ORT's gradient definitions GO is the gradient of an output, GI that of an input, O an output.
def _chunked_loss_gradient_nodes(
    hidden_and_weight_dtypes: list[torch.dtype],
) -> Iterator[tuple[Any, ...]]:
    """Yield the nodes of a gradient definition.

    The gradients of weight and bias are multiplied in float32 or above, then cast to the weight's
    type.
    """
    yield "Mul", ["GO(0)", "O(4)"], ["factor"]
    yield "Cast", ["factor"], ["own"], _cast_to_dtype_attribute(hidden_and_weight_dtypes[0])
    yield "Mul", ["O(1)", "own"], ["GI(0)"]
    for position in (1, 2):
        yield "Mul", [f"O({position + 1})", "factor"], [f"exact_{position}"]
        yield (
            "Cast",
            [f"exact_{position}"],
            [f"GI({position})"],
            _cast_to_dtype_attribute(hidden_and_weight_dtypes[1]),
        )


def _cast_to_dtype_attribute(target_dtype: torch.dtype) -> dict[str, object]:
    from torch.onnx._type_utils import JitScalarType

    return {
        "to": {"value": int(JitScalarType.from_dtype(target_dtype).onnx_type()), "dtype": "int"}
    }

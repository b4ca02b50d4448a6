"""The chunked loss (worker/model/chunked_loss.py) as a call of torch's operator in ORT's graph.

ORT calls the operator as it calls aten operators. The forward pass also returns the gradients; the
backward pass multiplies them by the gradient of the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.ortmodule.tracing.symbolics import registered, type_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

OPERATOR = "ortlaunch::head_loss"


def calling_chunked_loss(export: AnyFunction) -> AnyFunction:
    """Wrap an export so that the operator of a chunked loss stays one call."""
    return registered(export, lambda: {OPERATOR: _symbolic})


def _symbolic(
    g: GraphContext, hidden: torch.Value, weight: torch.Value, *rest: torch.Value
) -> Sequence[torch.Value]:
    own = type_of(hidden)
    exact = torch.promote_types(type_of(hidden), torch.float32)
    _register_gradient([own, type_of(weight)])
    outputs = g.op(
        "org.pytorch.aten::ATen",
        hidden,
        weight,
        *rest,
        operator_s=OPERATOR,
        overload_name_s="",
        outputs=5,
    )
    for output, dtype in zip(outputs, (exact, own, exact, exact, exact)):
        # The first output, the loss, is a scalar; the sizes of the others are unknown.
        sizes: Any = [] if output is outputs[0] else None
        output.setType(hidden.type().with_dtype(dtype).with_sizes(sizes))
    return outputs


def _register_gradient(types: list[torch.dtype]) -> None:
    """Register the gradient for the current export, with the type codes of its tensors.

    ORT keeps the first registration: a process that has exported in float32 cannot build the graph
    of a float16 model with a chunked loss.
    """
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    module: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    key = f"org.pytorch.aten::ATen::{OPERATOR}::"
    module.register_gradient_definition(key, _to_gradient_definition(list(_gradient(types))))


# In ORT's gradient definitions GO is the gradient of an output, GI that of an input, O an output.
def _gradient(types: list[torch.dtype]) -> Iterator[tuple[Any, ...]]:
    """Yield the nodes of a gradient definition.

    The gradients of weight and bias are multiplied in float32 or above, then cast to the weight's
    type.
    """
    yield "Mul", ["GO(0)", "O(4)"], ["factor"]
    yield "Cast", ["factor"], ["own"], _to(types[0])
    yield "Mul", ["O(1)", "own"], ["GI(0)"]
    for place in (1, 2):
        yield "Mul", [f"O({place + 1})", "factor"], [f"exact_{place}"]
        yield "Cast", [f"exact_{place}"], [f"GI({place})"], _to(types[1])


def _to(dtype: torch.dtype) -> dict[str, object]:
    from torch.onnx._type_utils import JitScalarType

    return {"to": {"value": int(JitScalarType.from_dtype(dtype).onnx_type()), "dtype": "int"}}

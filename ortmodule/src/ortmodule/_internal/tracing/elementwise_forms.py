"""ONNX forms of elementwise operators: clamp, GELU, casts and `detach`, as torch computes them."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.onnx import symbolic_helper

from ortmodule._internal.tracing.symbolics import (
    GraphWriter,
    OperatorForm,
    dtype_of_graph_value,
    torch_exporter_form,
)

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext


def clamp(g: GraphContext, x: Any, low: Any, high: Any) -> Any:
    """Write clamp with Where.

    The gradient of ONNX's Clip is a product, so an infinite gradient, such as that of a root at
    zero, becomes nan.
    """
    from torch.onnx._type_utils import JitScalarType

    type_code = int(JitScalarType.from_value(x, JitScalarType.FLOAT).onnx_type())
    for limit, comparison in ((low, "Less"), (high, "Greater")):
        if limit is not None and not symbolic_helper._is_none(limit):
            bound = g.op("Cast", limit, to_i=type_code)
            x = g.op("Where", g.op(comparison, x, bound), bound, x)
    return x


def clamp_min(g: GraphContext, x: Any, low: Any) -> Any:
    """Write clamp with a lower bound only; see `clamp`."""
    return clamp(g, x, low, None)


def clamp_max(g: GraphContext, x: Any, high: Any) -> Any:
    """Write clamp with an upper bound only; see `clamp`."""
    return clamp(g, x, None, high)


def gelu(g: GraphContext, x: Any, approximate: Any) -> Any:
    """Write a GELU as one operator of ORT's where its fusion does not make it of torch's form.

    These are a bfloat16 GELU, which bfloat16.py hands to torch, and the tanh form in float32, whose
    cube torch writes as products.
    """
    dtype, form_name = dtype_of_graph_value(x), approximate.node().s("value")
    if (dtype, form_name) == (torch.bfloat16, "none"):
        return g.op("com.microsoft::Gelu", x)
    if (dtype, form_name) == (torch.float32, "tanh"):
        return g.op("com.microsoft::FastGelu", x)
    return torch_exporter_form("gelu", 9)(g, x, approximate)


def create_form_without_redundant_casts(operator_name: str, opset: int) -> OperatorForm:
    """Return torch's form of an operator, without casts to the type that a tensor already has."""

    def symbolic(g: GraphContext, *args: Any) -> Any:
        from torch.onnx._type_utils import JitScalarType

        def cast_unless_equal(value: Any, to_i: int) -> Any:
            value_type = JitScalarType.from_value(value, JitScalarType.UNDEFINED)
            is_same_type = value_type != JitScalarType.UNDEFINED and int(
                value_type.onnx_type()
            ) == int(to_i)
            return value if is_same_type else g.op("Cast", value, to_i=to_i)

        return torch_exporter_form(operator_name, opset)(
            GraphWriter(g, {"Cast": cast_unless_equal}), *args
        )

    return symbolic


def detach(g: GraphContext, x: Any) -> Any:
    """Write a copy at which ORT stops the gradient.

    Torch leaves `detach` out of the graph, so the gradient would pass.
    """
    _register_ort_gradient_stop_at_clone_once()
    no_format = g.op("prim::Constant")
    no_format.setType(torch._C.OptionalType.ofTensor())
    copied = g.op("org.pytorch.aten::ATen", x, no_format, operator_s="clone", overload_name_s="")
    copied.setType(x.type())
    return copied


@functools.cache
def _register_ort_gradient_stop_at_clone_once() -> None:
    ort_bindings: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    clone = "org.pytorch.aten::ATen::clone::"
    ort_bindings.register_custom_stop_gradient_edges(clone, {0})
    # ORT requires a gradient definition for the copy of a weight in any case.
    ort_bindings.register_gradient_definition(clone, _create_zero_gradient_definition())


def _create_zero_gradient_definition() -> Any:
    """Return a gradient definition for a node with one input: zeros."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    zero = {"value": 0.0, "dtype": "IElemType(0)", "is_tensor": True}
    nodes = [
        ("Constant", [], ["zero"], {"value": zero}),
        ("Shape", ["I(0)"], ["sizes"]),
        ("Expand", ["zero", "sizes"], ["GI(0)"]),
    ]
    return _to_gradient_definition(nodes)

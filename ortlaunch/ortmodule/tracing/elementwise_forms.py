"""ONNX forms of elementwise operators: clamp, GELU, casts and `detach`, as torch computes them."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.onnx import symbolic_helper

from ortlaunch.ortmodule.tracing.symbolics import Form, GraphWriter, form_of_torch, type_of

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext


def clamp(g: GraphContext, x: Any, low: Any, high: Any) -> Any:
    """Write clamp with Where.

    The gradient of ONNX's Clip is a product, so an infinite gradient, such as that of a root at
    zero, becomes nan.
    """
    from torch.onnx._type_utils import JitScalarType

    kind = int(JitScalarType.from_value(x, JitScalarType.FLOAT).onnx_type())
    for given, beyond in ((low, "Less"), (high, "Greater")):
        if given is not None and not symbolic_helper._is_none(given):
            bound = g.op("Cast", given, to_i=kind)
            x = g.op("Where", g.op(beyond, x, bound), bound, x)
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
    dtype, how = type_of(x), approximate.node().s("value")
    if (dtype, how) == (torch.bfloat16, "none"):
        return g.op("com.microsoft::Gelu", x)
    if (dtype, how) == (torch.float32, "tanh"):
        return g.op("com.microsoft::FastGelu", x)
    return form_of_torch("gelu", 9)(g, x, approximate)


def casting(name: str, opset: int) -> Form:
    """Return torch's form of an operator, without casts to the type that a tensor already has."""

    def symbolic(g: GraphContext, *args: Any) -> Any:
        from torch.onnx._type_utils import JitScalarType

        def cast(value: Any, to_i: int) -> Any:
            known = JitScalarType.from_value(value, JitScalarType.UNDEFINED)
            same = known != JitScalarType.UNDEFINED and int(known.onnx_type()) == int(to_i)
            return value if same else g.op("Cast", value, to_i=to_i)

        return form_of_torch(name, opset)(GraphWriter(g, {"Cast": cast}), *args)

    return symbolic


def detach(g: GraphContext, x: Any) -> Any:
    """Write a copy at which ORT stops the gradient.

    Torch leaves `detach` out of the graph, so the gradient would pass.
    """
    _stop_gradient_at_copies()
    no_format = g.op("prim::Constant")
    no_format.setType(torch._C.OptionalType.ofTensor())
    copied = g.op("org.pytorch.aten::ATen", x, no_format, operator_s="clone", overload_name_s="")
    copied.setType(x.type())
    return copied


@functools.cache
def _stop_gradient_at_copies() -> None:
    c: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    clone = "org.pytorch.aten::ATen::clone::"
    c.register_custom_stop_gradient_edges(clone, {0})
    # ORT requires a gradient definition for the copy of a weight in any case.
    c.register_gradient_definition(clone, _no_gradient())


def _no_gradient() -> Any:
    """Return a gradient definition for a node with one input: zeros."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    zero = {"value": 0.0, "dtype": "IElemType(0)", "is_tensor": True}
    nodes = [
        ("Constant", [], ["zero"], {"value": zero}),
        ("Shape", ["I(0)"], ["sizes"]),
        ("Expand", ["zero", "sizes"], ["GI(0)"]),
    ]
    return _to_gradient_definition(nodes)

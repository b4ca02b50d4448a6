"""ONNX forms whose values and gradients are torch's where those of torch's exporter are not."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.ortmodule.tracing.symbolics import Form, GraphWriter, number_like, type_of

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext


def _form_of_torch(name: str, opset: int) -> Form:
    form: Form = getattr(importlib.import_module(f"torch.onnx.symbolic_opset{opset}"), name)
    return form


def clamp(g: GraphContext, x: Any, low: Any, high: Any) -> Any:
    """By choice: the gradient of ONNX's Clip is a product, in which infinity, as of a root of zero, becomes nan."""
    from torch.onnx import symbolic_helper
    from torch.onnx._type_utils import JitScalarType

    kind = int(JitScalarType.from_value(x, JitScalarType.FLOAT).onnx_type())
    for given, beyond in ((low, "Less"), (high, "Greater")):
        if given is not None and not symbolic_helper._is_none(given):
            bound = g.op("Cast", given, to_i=kind)
            x = g.op("Where", g.op(beyond, x, bound), bound, x)
    return x


def clamp_min(g: GraphContext, x: Any, low: Any) -> Any:
    """As `clamp`."""
    return clamp(g, x, low, None)


def clamp_max(g: GraphContext, x: Any, high: Any) -> Any:
    """As `clamp`."""
    return clamp(g, x, None, high)


def gelu(g: GraphContext, x: Any, approximate: Any) -> Any:
    """In bfloat16 ORT's own, as its fusion makes it of torch's form in other types; bfloat16.py hands it to torch."""
    if type_of(x) == torch.bfloat16 and approximate.node().s("value") == "none":
        return g.op("com.microsoft::Gelu", x)
    return _form_of_torch("gelu", 9)(g, x, approximate)


def rooted(name: str) -> Form:
    """Torch's form of an operator, with a square root whose gradient is zero at zero."""

    def symbolic(g: GraphContext, *args: Any) -> Any:
        def root(square: Any) -> Any:
            zero = number_like(g, 0.0, square)
            nothing = g.op("Equal", square, zero)
            safe = g.op("Where", nothing, number_like(g, 1.0, square), square)
            return g.op("Where", nothing, zero, g.op("Sqrt", safe))

        return _form_of_torch(name, 9)(GraphWriter(g, {"Sqrt": root}), *args)

    return symbolic


def casting(name: str, opset: int) -> Form:
    """Torch's form of an operator, without a cast to the type that a tensor has."""

    def symbolic(g: GraphContext, *args: Any) -> Any:
        from torch.onnx._type_utils import JitScalarType

        def cast(value: Any, to_i: int) -> Any:
            known = JitScalarType.from_value(value, JitScalarType.UNDEFINED)
            same = known != JitScalarType.UNDEFINED and int(known.onnx_type()) == int(to_i)
            return value if same else g.op("Cast", value, to_i=to_i)

        return _form_of_torch(name, opset)(GraphWriter(g, {"Cast": cast}), *args)

    return symbolic


def detach(g: GraphContext, x: Any) -> Any:
    """A copy that ORT is told not to derive: torch leaves `detach` out, and the gradient would go through."""
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
    c.register_gradient_definition(
        clone, _no_gradient()
    )  # which ORT wants of a weight's copy all the same


def _no_gradient() -> Any:
    """Of a node with one input: zeros, as a gradient definition of ORT's."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    zero = {"value": 0.0, "dtype": "IElemType(0)", "is_tensor": True}
    nodes = [
        ("Constant", [], ["zero"], {"value": zero}),
        ("Shape", ["I(0)"], ["sizes"]),
        ("Expand", ["zero", "sizes"], ["GI(0)"]),
    ]
    return _to_gradient_definition(nodes)

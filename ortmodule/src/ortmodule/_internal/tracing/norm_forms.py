"""ONNX forms of LayerNorm, standard deviation and norm, with torch's gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.onnx import symbolic_helper

from ortmodule._internal.tracing.symbolics import (
    GraphWriter,
    OperatorForm,
    ort_form_by_operator,
    torch_exporter_form,
    write_scalar_constant_in_type_of,
)

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext


def layer_norm(g: GraphContext, x: Any, sizes: Any, weight: Any, bias: Any, *others: Any) -> Any:
    """Write a LayerNorm that has weights and no bias with a bias of zeros.

    ORT's gradient without a bias is wrong. The zeros are computed, as 0 * weight: the exporter
    shares a constant between norms, and ORT would give two gradients the same name.
    """
    if symbolic_helper._is_none(bias) and not symbolic_helper._is_none(weight):
        bias = g.op("Mul", weight, write_scalar_constant_in_type_of(g, 0.0, weight))
    return ort_form_by_operator()["aten::layer_norm"](g, x, sizes, weight, bias, *others)


def create_form_with_zero_gradient_root(operator_name: str) -> OperatorForm:
    """Return torch's form of an operator with a square root whose gradient at zero is zero."""

    def symbolic(g: GraphContext, *args: Any) -> Any:
        def write_safe_root(square: Any) -> Any:
            zero = write_scalar_constant_in_type_of(g, 0.0, square)
            is_zero = g.op("Equal", square, zero)
            # Where the square is 0 the root is taken of 1: the root's infinite gradient times
            # Where's 0 would be nan.
            safe_square = g.op(
                "Where", is_zero, write_scalar_constant_in_type_of(g, 1.0, square), square
            )
            return g.op("Where", is_zero, zero, g.op("Sqrt", safe_square))

        return torch_exporter_form(operator_name, 9)(
            GraphWriter(g, {"Sqrt": write_safe_root}), *args
        )

    return symbolic

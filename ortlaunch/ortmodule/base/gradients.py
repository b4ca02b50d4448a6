"""Which inputs and weights of a graph get a gradient: none that is frozen, none that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.differentiable import STOPS
from ortlaunch.ortmodule.base.export import Export

if TYPE_CHECKING:
    import onnx


def without_frozen(export: Export, model: onnx.ModelProto, names: list[str]) -> list[str]:
    """ORT computes a gradient for every frozen parameter in every step, and throws it away."""
    frozen = {
        name for name, parameter in export.module.named_parameters() if not parameter.requires_grad
    }
    return [name for name in names if name not in frozen]


def without_unreached(export: Export, model: onnx.ModelProto, names: list[str]) -> list[str]:
    """ORT ended where a weight is used and has no gradient: under no_grad, before an argmax, behind detach."""
    found = reached(model.graph)
    used = {name for node in model.graph.node for name in node.input}
    return [name for name in names if name in found or name not in used]


def reached(graph: onnx.GraphProto, outputs: Iterable[str] | None = None) -> set[str]:
    """Names of a graph through which a gradient of these outputs may come, by default of all."""
    makers = {name: node for node in graph.node for name in node.output}
    reached: set[str] = set()
    pending = [output.name for output in graph.output] if outputs is None else list(outputs)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            node = makers.get(name)
            if node is not None and not ends_gradients(node, name):
                pending += [
                    given
                    for place, given in enumerate(node.input)
                    if place not in STOPS.get(node.op_type, ())
                ]
    return reached


_NUMBERS = {
    "ArgMax",
    "ArgMin",
    "NonZero",
    "Shape",
    "Size",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
}
_OPERATORS = {b"argmax", b"bitwise_or", b"clone"}


def ends_gradients(node: onnx.NodeProto, output: str) -> bool:
    """Whether a node makes whole numbers or truths, or what `detach` is exported to (ATen's clone: exact_forms.py)."""
    if node.op_type == "TopK" and output != node.output[0]:
        return True
    return node.op_type in _NUMBERS or any(
        a.name == "operator" and a.s in _OPERATORS for a in node.attribute
    )

"""The inputs and weights of a graph that get a gradient: not frozen, and reached by a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.differentiable import STOPS
from ortlaunch.ortmodule.base.export import Export

if TYPE_CHECKING:
    import onnx


def without_frozen(export: Export, model: onnx.ModelProto, names: list[str]) -> list[str]:
    """Return the names without those of frozen parameters.

    ORT computes a gradient for every frozen parameter in every step, and discards it.
    """
    frozen = {
        name for name, parameter in export.module.named_parameters() if not parameter.requires_grad
    }
    return [name for name in names if name not in frozen]


def without_unreached(export: Export, model: onnx.ModelProto, names: list[str]) -> list[str]:
    """Return the names without those that are used but that no gradient reaches.

    ORT fails where a weight is used and has no gradient: under no_grad, before an argmax, behind
    detach.
    """
    found = reached(model.graph)
    used = {name for node in model.graph.node for name in node.input}
    # ORT itself handles a weight that no node uses.
    return [name for name in names if name in found or name not in used]


def reached(graph: onnx.GraphProto, outputs: Iterable[str] | None = None) -> set[str]:
    """Return the names through which a gradient of these outputs (default: all) may pass."""
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


def trained_inputs(export: Export) -> set[str]:
    """Return the names of inputs of the graph and of weights that get a gradient."""
    return {
        name for name, weight in export.module.named_parameters() if weight.requires_grad
    }.union(export.info.onnx_graph_input_names_require_grad)


def trained_values(export: Export, graph: onnx.GraphProto) -> set[str]:
    """Return the names of all values that depend on an input or a weight with a gradient."""
    trained = trained_inputs(export)
    for node in graph.node:
        stops = STOPS.get(node.op_type, ())
        if any(name in trained for place, name in enumerate(node.input) if place not in stops):
            trained.update(output for output in node.output if not ends_gradients(node, output))
    return trained


# Operators whose results are integers or booleans, which have no gradient.
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
# The same for torch's operators behind ATen nodes; elementwise_forms.py exports `detach` as `clone`.
_OPERATORS = {b"argmax", b"bitwise_or", b"clone"}
# ONNX's codes of float32, float16, float64 and bfloat16.
_FLOATS = {1, 10, 11, 16}


def ends_gradients(node: onnx.NodeProto, output: str) -> bool:
    """Return whether no gradient passes a node: its output is integer, boolean or detached."""
    # The second output of TopK are indices.
    if node.op_type == "TopK" and output != node.output[0]:
        return True
    if node.op_type == "Cast":
        return next(a.i for a in node.attribute if a.name == "to") not in _FLOATS
    return node.op_type in _NUMBERS or any(
        a.name == "operator" and a.s in _OPERATORS for a in node.attribute
    )

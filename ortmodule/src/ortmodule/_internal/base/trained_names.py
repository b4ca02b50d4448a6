"""The inputs and weights of a graph that get a gradient: not frozen, and reached by a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.gradient_paths import INPUTS_WITHOUT_GRADIENT
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair

if TYPE_CHECKING:
    import onnx


@repair(
    "skip_frozen_gradients",
    "gradient selection",
    10,
    fault="The graph of a model with adapters computes the gradient of every frozen weight, too.",
    example="test_repairs.py::test_frozen_weights_have_no_gradient_in_the_graph",
    sources=EXPORT_SOURCES,
)
def input_names_besides_frozen_weights(
    export_context: ExportContext, onnx_model: onnx.ModelProto, input_names: list[str]
) -> list[str]:
    """Return the names without those of frozen parameters.

    ORT computes a gradient for every frozen parameter in every step, and discards it.
    """
    frozen = {
        name
        for name, parameter in export_context.module.named_parameters()
        if not parameter.requires_grad
    }
    return [name for name in input_names if name not in frozen]


@repair(
    "skip_unreached_weights",
    "gradient selection",
    20,
    fault="A weight that is used only before an argmax or a cast to integers ends the build of "
    "the gradient (`Cannot compute the partial derivative`).",
    example="tracing/test_grad_mode.py::test_loss_and_gradients_are_eagers[a_choice-training]",
    sources=EXPORT_SOURCES,
)
def input_names_reached_by_gradient_or_unused(
    export_context: ExportContext, onnx_model: onnx.ModelProto, input_names: list[str]
) -> list[str]:
    """Return the names without those that are used but that no gradient reaches.

    ORT fails where a weight is used and has no gradient: under no_grad, before an argmax, behind
    detach.
    """
    reached_names = value_names_reached_by_gradient_of_outputs(onnx_model.graph)
    used_names = {name for node in onnx_model.graph.node for name in node.input}
    # ORT itself handles a weight that no node uses.
    return [name for name in input_names if name in reached_names or name not in used_names]


def value_names_reached_by_gradient_of_outputs(
    onnx_graph: onnx.GraphProto, output_names: Iterable[str] | None = None
) -> set[str]:
    """Return the names through which a gradient of these outputs (default: all) may pass."""
    node_by_output = {name: node for node in onnx_graph.node for name in node.output}
    reached_names: set[str] = set()
    pending = (
        [output.name for output in onnx_graph.output]
        if output_names is None
        else list(output_names)
    )
    while pending:
        name = pending.pop()
        if name not in reached_names:
            reached_names.add(name)
            node = node_by_output.get(name)
            if node is not None and not blocks_gradient(node, name):
                pending += [
                    input_name
                    for position, input_name in enumerate(node.input)
                    if position not in INPUTS_WITHOUT_GRADIENT.get(node.op_type, ())
                ]
    return reached_names


def trained_input_and_weight_names(export_context: ExportContext) -> set[str]:
    """Return the names of inputs of the graph and of weights that get a gradient."""
    return {
        name for name, weight in export_context.module.named_parameters() if weight.requires_grad
    }.union(export_context.info.onnx_graph_input_names_require_grad)


def names_of_trained_inputs_and_dependent_values(
    export_context: ExportContext, onnx_graph: onnx.GraphProto
) -> set[str]:
    """Return the names of all values that depend on an input or a weight with a gradient."""
    trained_names = trained_input_and_weight_names(export_context)
    for node in onnx_graph.node:
        stopped_positions = INPUTS_WITHOUT_GRADIENT.get(node.op_type, ())
        if any(
            name in trained_names
            for position, name in enumerate(node.input)
            if position not in stopped_positions
        ):
            trained_names.update(
                output_name for output_name in node.output if not blocks_gradient(node, output_name)
            )
    return trained_names


# Operators whose results are integers or booleans, which have no gradient.
_INTEGER_OPERATORS = {
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
_ATEN_WITHOUT_GRADIENT = {b"argmax", b"bitwise_or", b"clone"}
# ONNX's codes of float32, float16, float64 and bfloat16.
_FLOAT_TYPE_CODES = {1, 10, 11, 16}


def blocks_gradient(onnx_node: onnx.NodeProto, output_name: str) -> bool:
    """Return whether no gradient passes a node: its output is integer, boolean or detached."""
    # The second output of TopK are indices.
    if onnx_node.op_type == "TopK" and output_name != onnx_node.output[0]:
        return True
    if onnx_node.op_type == "Cast":
        return next(a.i for a in onnx_node.attribute if a.name == "to") not in _FLOAT_TYPE_CODES
    return onnx_node.op_type in _INTEGER_OPERATORS or any(
        a.name == "operator" and a.s in _ATEN_WITHOUT_GRADIENT for a in onnx_node.attribute
    )

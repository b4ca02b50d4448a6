"""Inputs of a node that are replaced by a copy, because ORT fails with the tensor itself."""

from __future__ import annotations

import onnx
from onnx import helper

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair
from ortmodule._internal.base.trained_names import trained_input_and_weight_names


@repair(
    "sum_repeated_weights",
    "graph pass",
    60,
    fault="A weight that one operator alone takes twice, as in `row * row`, ends the build of "
    "the gradient (`Duplicate definition of name (row_grad)`).",
    example="graph_repairs/test_copied_inputs.py::test_an_operator_takes_a_weight_twice[mul]",
    sources=EXPORT_SOURCES,
)
def copy_trained_inputs_repeated_in_one_node(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Let a node use a weight once; further uses read a copy.

    ORT adds up a weight's gradients of several nodes only, not of several inputs of one node.
    """
    trained_names = trained_input_and_weight_names(export_context)
    nodes = []
    for node in exported_model.graph.node:
        for position, name in enumerate(node.input):
            if name in trained_names and name in node.input[:position]:
                nodes += _redirect_input_and_create_double_negation_nodes(node, position)
        nodes.append(node)
    replace_and_name_graph_nodes(exported_model.graph, nodes)


@repair("export_smoothed_cross_entropy", "graph pass", 70)
def copy_loss_scores_that_no_node_computes(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Let a loss read a copy of its scores where these are an input or a weight.

    ORT's CastSceLossFusion reads the node that computes the scores. Without one the process crashes.
    """
    computed_names = {name for node in exported_model.graph.node for name in node.output}
    nodes = []
    for node in exported_model.graph.node:
        if (
            node.op_type == "SoftmaxCrossEntropyLossInternal"
            and node.input[0] not in computed_names
        ):
            nodes += _redirect_input_and_create_double_negation_nodes(node, 0)
        nodes.append(node)
    replace_and_name_graph_nodes(exported_model.graph, nodes)


def _redirect_input_and_create_double_negation_nodes(
    reading_node: onnx.NodeProto, input_position: int
) -> list[onnx.NodeProto]:
    """Let the node read a copy of this input, and return the nodes that compute the copy."""
    original_name = reading_node.input[input_position]
    copied_name = reading_node.input[input_position] = (
        f"{reading_node.output[0]}_apart_{input_position}"
    )
    # Two negations leave the value, ORT does not remove them, and each has a gradient.
    names = original_name, f"{copied_name}_minus", copied_name
    return [
        helper.make_node("Neg", [source_name], [output_name])
        for source_name, output_name in zip(names, names[1:])
    ]

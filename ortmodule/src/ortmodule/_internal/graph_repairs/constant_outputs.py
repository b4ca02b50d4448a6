"""Outputs of a model that are constants, such as a Python number or `torch.zeros(1)`.

ORT makes a tensor of a number, which may be a size of the batch. It folds the nodes that compute a
constant, and its gradient builder then fails, because no node has the output. Here a node computes
it that depends on an input of the graph.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair


@repair(
    "compute_constant_outputs",
    "graph pass",
    80,
    fault='A model that returns a number or a constant, such as `{"loss": loss, "aux_loss": '
    "torch.zeros(1)}`, ends the build of the gradient (`couldn't find the producer node`).",
    example="state/test_outputs.py::test_a_constant_is_an_output[zeros]",
    sources=EXPORT_SOURCES,
)
def make_constant_training_outputs_unfoldable(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Let a node that ORT cannot fold compute each constant output of a training graph."""
    graph = exported_model.graph
    varying_names = {graph_input.name for graph_input in graph.input}
    for node in graph.node:
        if varying_names.intersection(node.input):
            varying_names.update(node.output)
    constant_names = {output.name for output in graph.output} - varying_names
    if not export_context.training or not constant_names or not graph.input:
        return
    new_name_by_name = {name: f"{name}_constant" for name in constant_names}
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = new_name_by_name.get(name, name)
        for position, name in enumerate(node.output):
            node.output[position] = new_name_by_name.get(name, name)
    for tensor in graph.initializer:
        tensor.name = new_name_by_name.get(tensor.name, tensor.name)
    size_name, zero_name, one_name, sizes_name, empty_name = (
        f"constant_outputs_{name}" for name in ("size", "zero", "one", "sizes", "nothing")
    )
    numbers = {zero_name: helper.make_tensor("", TensorProto.INT64, [1], [0])}
    numbers[one_name] = helper.make_tensor("", TensorProto.INT64, [1], [1])
    nodes = [
        *(helper.make_node("Constant", [], [name], value=numbers[name]) for name in numbers),
        helper.make_node("Size", [graph.input[0].name], [size_name]),
        helper.make_node("Reshape", [size_name, one_name], [sizes_name]),
        helper.make_node("Slice", [sizes_name, zero_name, zero_name, zero_name], [empty_name]),
        # A tensor that is expanded to the empty shape stays as it is.
        *(
            helper.make_node("Expand", [new_name_by_name[name], empty_name], [name])
            for name in sorted(constant_names)
        ),
    ]
    replace_and_name_graph_nodes(graph, [*graph.node, *nodes])

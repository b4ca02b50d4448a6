"""Outputs of a model that are constants, such as a Python number or `torch.zeros(1)`.

ORT makes a tensor of a number, which may be a size of the batch. It folds the nodes that compute a
constant, and its gradient builder then fails, because no node has the output. Here a node computes
it that depends on an input of the graph.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.graph import replace_nodes


def compute_outputs(export: Export, model: onnx.ModelProto) -> None:
    """Let a node that ORT cannot fold compute each constant output of a training graph."""
    graph = model.graph
    varying = {given.name for given in graph.input}
    for node in graph.node:
        if varying.intersection(node.input):
            varying.update(node.output)
    constant = {output.name for output in graph.output} - varying
    if not export.training or not constant or not graph.input:
        return
    names = {name: f"{name}_constant" for name in constant}
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = names.get(name, name)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    size, zero, one, sizes, nothing = (
        f"constant_outputs_{name}" for name in ("size", "zero", "one", "sizes", "nothing")
    )
    numbers = {zero: helper.make_tensor("", TensorProto.INT64, [1], [0])}
    numbers[one] = helper.make_tensor("", TensorProto.INT64, [1], [1])
    nodes = [
        *(helper.make_node("Constant", [], [name], value=numbers[name]) for name in numbers),
        helper.make_node("Size", [graph.input[0].name], [size]),
        helper.make_node("Reshape", [size, one], [sizes]),
        helper.make_node("Slice", [sizes, zero, zero, zero], [nothing]),
        # A tensor that is expanded to the empty shape stays as it is.
        *(helper.make_node("Expand", [names[name], nothing], [name]) for name in sorted(constant)),
    ]
    replace_nodes(graph, [*graph.node, *nodes])

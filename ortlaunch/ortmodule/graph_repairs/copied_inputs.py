"""Inputs of a node that are replaced by a copy, because ORT fails with the tensor itself."""

from __future__ import annotations

import onnx
from onnx import helper

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.gradients import trained_inputs
from ortlaunch.ortmodule.base.graph import replace_nodes


def use_weights_once(export: Export, model: onnx.ModelProto) -> None:
    """Let a node use a weight once; further uses read a copy.

    ORT adds up a weight's gradients of several nodes only, not of several inputs of one node.
    """
    weights = trained_inputs(export)
    nodes = []
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in weights and name in node.input[:place]:
                nodes += _copy(node, place)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def compute_scores(export: Export, model: onnx.ModelProto) -> None:
    """Let a loss read a copy of its scores where these are an input or a weight.

    ORT's CastSceLossFusion reads the node that computes the scores. Without one the process crashes.
    """
    computed = {name for node in model.graph.node for name in node.output}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "SoftmaxCrossEntropyLossInternal" and node.input[0] not in computed:
            nodes += _copy(node, 0)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _copy(node: onnx.NodeProto, place: int) -> list[onnx.NodeProto]:
    """Let the node read a copy of this input, and return the nodes that compute the copy."""
    given = node.input[place]
    copied = node.input[place] = f"{node.output[0]}_apart_{place}"
    # Two negations leave the value, ORT does not remove them, and each has a gradient.
    names = given, f"{copied}_minus", copied
    return [helper.make_node("Neg", [read], [made]) for read, made in zip(names, names[1:])]

"""Tensors that a graph takes more than once, and padding.

The former are tensors without a gradient that are concatenated, such as zeros to pad with or a buffer, and a weight
that one node takes twice.

ORT's gradient of a Concat names a gradient for each of its inputs, wanted or not, that of a BatchNormalization for its
scale and bias. It adds up those of a trained input; another's would be two results of one name, and the build ends. In
the graph that ORT gets, each place takes a slice of its own: the whole, from a place before the first, which is no
other's, or ORT would make one of equal ones.

Integers, such as a Llama's shifted labels, are padded by concatenation: ORT's Pad of them has no CUDA kernel, and would
copy them to the CPU and back, with a wait, in each step. Negative amounts are slices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ortlaunch.ortmodule.base.differentiable import STOPS
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.gradients import ends_gradients
from ortlaunch.ortmodule.base.graph import replace_nodes

if TYPE_CHECKING:
    import onnx

_NAMED = {"Concat": range(2**20), "BatchNormalization": (1, 2)}
_BEFORE = -(2**40)
_BEHIND = 2**62


def keep_constants_apart(export: Export, model: onnx.ModelProto) -> None:
    """ORT ended where two of them, or one twice, take a tensor that gets no gradient."""
    if not export.training:
        return
    graph = model.graph
    trained = _trained(export, graph)
    places = {
        (node.output[0], place)
        for node in graph.node
        if trained.intersection(node.output)
        for place, name in enumerate(node.input)
        if place in _NAMED.get(node.op_type, ()) and name not in trained
    }
    if len(places) > 1:  # also of other names: ORT finds out where they are equal
        replace_nodes(graph, _with_slices(graph, places, export.info.onnx_graph_input_names[0]))


def _with_slices(
    graph: onnx.GraphProto, places: set[tuple[str, int]], given: str
) -> list[onnx.NodeProto]:
    made = [
        node
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    ]
    constants = {node.output[0]: node.attribute[0].t.dims for node in made}
    constants.update({tensor.name: tensor.dims for tensor in graph.initializer})
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            if node.output and (node.output[0], place) in places:
                whole = node.input[place] = f"{node.output[0]}_ortlaunch_{place}"
                if name in constants:
                    nodes += _constant(name, whole, _BEFORE - len(nodes), constants[name], given)
                else:
                    nodes += [
                        _numbers(f"{whole}_begin", _BEFORE - len(nodes)),
                        *_slice(name, whole, whole),
                    ]
        nodes.append(node)
    return nodes


def _slice(name: str, whole: str, to: str) -> list[onnx.NodeProto]:
    from onnx import helper

    given = [name, f"{whole}_begin", f"{whole}_end", f"{whole}_axis"]
    return [
        _numbers(given[2], _BEHIND),
        _numbers(given[3], 0),
        helper.make_node("Slice", given, [to]),
    ]


def _constant(
    name: str, whole: str, begin: int, dims: Sequence[int], given: str
) -> list[onnx.NodeProto]:
    """From a place that only a pass knows, or ORT would compute the slice, and make one of equal ones."""
    from onnx import helper

    return [
        _numbers(f"{whole}_before", begin),
        helper.make_node("Size", [given], [f"{whole}_size"]),
        helper.make_node("Add", [f"{whole}_size", f"{whole}_before"], [f"{whole}_begin"]),
        *_slice(name, whole, f"{whole}_slice"),
        _numbers(f"{whole}_dims", *dims),
        helper.make_node("Reshape", [f"{whole}_slice", f"{whole}_dims"], [whole], allowzero=1),
    ]


def _numbers(name: str, *numbers: int) -> onnx.NodeProto:
    from onnx import TensorProto, helper

    value = helper.make_tensor("", TensorProto.INT64, [len(numbers)], numbers)
    return helper.make_node("Constant", [], [name], value=value)


def use_weights_once(export: Export, model: onnx.ModelProto) -> None:
    """Let a node take a weight once, and minus minus the weight: ORT adds up gradients of several nodes only."""
    from onnx import helper

    weights = _weights(export)
    nodes = []
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in weights and name in node.input[:place]:
                node.input[place] = f"{node.output[0]}_ortlaunch_{place}"
                names = name, f"{node.input[place]}_minus", node.input[place]
                nodes += [
                    helper.make_node("Neg", [given], [made])
                    for given, made in zip(names, names[1:])
                ]
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _weights(export: Export) -> set[str]:
    return {
        name for name, weight in export.module.named_parameters() if weight.requires_grad
    }.union(export.info.onnx_graph_input_names_require_grad)


def _trained(export: Export, graph: onnx.GraphProto) -> set[str]:
    """What a gradient goes back through."""
    trained = _weights(export)
    for node in graph.node:
        stops = STOPS.get(node.op_type, ())
        if any(name in trained for place, name in enumerate(node.input) if place not in stops):
            trained.update(output for output in node.output if not ends_gradients(node, output))
    return trained


def padding_exactly(export: Export) -> AbstractContextManager[Any]:
    """While open, torch.nn.functional.pad concatenates integers with constants, and crops by slices."""
    parts: Any = torch._C._nn
    plain = parts.pad

    @functools.wraps(plain)
    def pad(
        x: Any, amounts: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> Any:
        if mode != "constant" or torch.is_complex(x):
            return plain(x, amounts, mode, value)
        x = _cropped(x, amounts)
        amounts = [max(0, amount) for amount in amounts]
        if x.is_floating_point() or x.dtype == torch.bool:
            return plain(x, amounts, mode, value) if any(amounts) else x.clone()
        for place in range(0, len(amounts), 2):
            axis = x.dim() - 1 - place // 2
            one = torch.full_like(x.sum(axis, keepdim=True, dtype=x.dtype), int(value or 0))
            before, after = (
                [one.expand([count if dim == axis else -1 for dim in range(x.dim())])]
                if count
                else []
                for count in amounts[place : place + 2]
            )
            x = torch.cat([*before, x, *after], axis) if before or after else x
        return x

    return mock.patch.object(parts, "pad", pad)


def _cropped(x: torch.Tensor, amounts: Sequence[int]) -> torch.Tensor:
    """The part that negative amounts leave: ORT's Pad reads beside a tensor of which they leave nothing."""
    parts = [slice(None)] * x.dim()
    for place in range(0, len(amounts), 2):
        before, after = amounts[place : place + 2]
        parts[x.dim() - 1 - place // 2] = slice(max(0, -before), min(0, after) or None)
    return x[tuple(parts)] if min(amounts, default=0) < 0 else x

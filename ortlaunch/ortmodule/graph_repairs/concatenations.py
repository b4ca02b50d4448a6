"""Tensors that a graph uses more than once, scores that no node computes, and padding.

The former are tensors without a gradient, such as zeros to pad with, a buffer, a frozen weight or
the batch, and a weight that one node uses twice.

ORT's gradient of a Concat names a gradient for each of its inputs, needed or not; those of a
BatchNormalization and a LayerNormalization do so for the input, scale and bias, also where ORT makes
the node of a normalization that is written out. ORT adds up the gradients of a trained input. For
another input, two results would have one name, and the build fails. In the graph that ORT gets,
each use reads its own slice of the tensor. The slice is the whole tensor and begins at a unique
position before the first element, because ORT would merge equal slices.

Integers, such as a Llama's shifted labels, are padded by concatenation: ORT's Pad has no CUDA
kernel for them, and would copy them to the CPU and back in each step, with a wait. Negative amounts
are slices.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import onnx
import torch
from onnx import TensorProto, helper

from ortlaunch.ortmodule.base.differentiable import STOPS
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.gradients import ends_gradients
from ortlaunch.ortmodule.base.graph import replace_nodes

# Operators and positions of inputs for which ORT names a gradient, needed or not.
_GRADIENT_INPUTS = {
    "Concat": range(2**20),
    "BatchNormalization": range(3),
    "LayerNormalization": range(3),
}
# Operators with which a written-out RMSNorm or LayerNorm begins: ORT fuses it into one node.
_NORM_STARTS = {"Pow", "ReduceMean"}
# Start and end of a slice, beyond those of any tensor: a slice between them is the whole.
_BEFORE = -(2**40)
_BEHIND = 2**62


def keep_constants_apart(export: Export, model: onnx.ModelProto) -> None:
    """Give each use of a tensor without a gradient its own slice.

    ORT failed where two nodes, or one node twice, use such a tensor in a Concat or a normalization.
    """
    # Without a backward pass no gradient gets a name.
    if not export.training:
        return
    graph = model.graph
    trained = _trained(export, graph)
    numbers = _value_numbers(graph, trained)
    named = [
        (node, place)
        for node, place in _gradient_inputs(graph)
        if node.input[place] not in trained
        and (node.op_type in _NORM_STARTS or trained.intersection(node.output))
    ]
    read = [numbers.get(node.input[place], node.input[place]) for node, place in named]
    uses = Counter(read)
    places = {
        (node.output[0], place)
        for (node, place), value in zip(named, read)
        # The nodes of a written-out normalization must read one tensor, or ORT does not fuse them.
        if node.op_type not in _NORM_STARTS
        # Every part of a Concat, in case ORT simplifies two computations to the same one. No test
        # needs this.
        and (node.op_type == "Concat" or uses[value] > 1)
    }
    if len(named) > 1 and places:
        replace_nodes(graph, _with_slices(graph, places, export.info.onnx_graph_input_names[0]))


def _value_numbers(graph: onnx.GraphProto, trained: set[str]) -> dict[str, tuple[int, int]]:
    """Return the value number of each computed tensor without a gradient, by name.

    Tensors of equal computations have equal value numbers: ORT merges their nodes.
    """
    computations: dict[tuple[object, ...], int] = {}
    numbers: dict[str, tuple[int, int]] = {}
    for node in graph.node:
        if not trained.intersection(node.output):
            attributes = sorted(one.SerializeToString() for one in node.attribute)
            inputs = (numbers.get(name, name) for name in node.input)
            computation = (node.op_type, *inputs, *attributes)
            number = computations.setdefault(computation, len(computations))
            numbers.update((name, (number, place)) for place, name in enumerate(node.output))
    return numbers


def _gradient_inputs(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes and positions of inputs for which ORT names a gradient."""
    makers = {name: node for node in graph.node for name in node.output}
    scaled: set[str] = set()
    # Tensors of at least one dimension: a slice takes no scalar.
    vectors = {value.name for value in graph.input if value.type.tensor_type.shape.dim}
    vectors.update(tensor.name for tensor in graph.initializer if tensor.dims)
    for node in graph.node:
        places = (
            range(1) if node.op_type in _NORM_STARTS else _GRADIENT_INPUTS.get(node.op_type, ())
        )
        yield from ((node, place) for place in range(len(node.input)) if place in places)
        if node.op_type in {"Mul", "Add"}:
            # Scale and bias of a normalization that is written out.
            for place, (name, other) in enumerate(zip(node.input, reversed(node.input))):
                found = other in scaled if node.op_type == "Add" else _is_normalized(makers, other)
                if found and name in vectors:
                    scaled.update(node.output)
                    yield node, place
        # A scale may be computed, such as 1 + weight in Gemma.
        if vectors.intersection(node.input) and node.op_type in {"Add", "Mul", "Exp", "Cast"}:
            vectors.update(node.output)
        if node.op_type == "Constant" and node.attribute[0].t.dims:
            vectors.update(node.output)


def _is_normalized(makers: Mapping[str, onnx.NodeProto], name: str) -> bool:
    """Return whether a value is a tensor divided by a root, which a Cast may follow."""
    nothing = onnx.NodeProto()
    node = makers.get(name, nothing)
    if node.op_type == "Cast":
        node = makers.get(node.input[0], nothing)
    # torch exports rsqrt as 1 / Sqrt.
    quotients = (
        [makers.get(given, nothing) for given in node.input] if node.op_type == "Mul" else [node]
    )
    return any(
        found.op_type == "Div" and makers.get(found.input[1], nothing).op_type == "Sqrt"
        for found in quotients
    )


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
                whole = node.input[place] = f"{node.output[0]}_apart_{place}"
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
    given = [name, f"{whole}_begin", f"{whole}_end", f"{whole}_axis"]
    return [
        _numbers(given[2], _BEHIND),
        _numbers(given[3], 0),
        helper.make_node("Slice", given, [to]),
    ]


def _constant(
    name: str, whole: str, begin: int, dims: Sequence[int], given: str
) -> list[onnx.NodeProto]:
    """Return nodes that slice a constant from a position that is known only in a pass.

    With a known position ORT would compute the slice in advance, and merge equal results.
    """
    return [
        _numbers(f"{whole}_before", begin),
        helper.make_node("Size", [given], [f"{whole}_size"]),
        helper.make_node("Add", [f"{whole}_size", f"{whole}_before"], [f"{whole}_begin"]),
        *_slice(name, whole, f"{whole}_slice"),
        _numbers(f"{whole}_dims", *dims),
        helper.make_node("Reshape", [f"{whole}_slice", f"{whole}_dims"], [whole], allowzero=1),
    ]


def _numbers(name: str, *numbers: int) -> onnx.NodeProto:
    value = helper.make_tensor("", TensorProto.INT64, [len(numbers)], numbers)
    return helper.make_node("Constant", [], [name], value=value)


def use_weights_once(export: Export, model: onnx.ModelProto) -> None:
    """Let a node use a weight once; further uses read a copy.

    ORT adds up a weight's gradients of several nodes only, not of several inputs of one node.
    """
    weights = _weights(export)
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


def _weights(export: Export) -> set[str]:
    return {
        name for name, weight in export.module.named_parameters() if weight.requires_grad
    }.union(export.info.onnx_graph_input_names_require_grad)


def _trained(export: Export, graph: onnx.GraphProto) -> set[str]:
    """Return the names through which a gradient passes."""
    trained = _weights(export)
    for node in graph.node:
        stops = STOPS.get(node.op_type, ())
        if any(name in trained for place, name in enumerate(node.input) if place not in stops):
            trained.update(output for output in node.output if not ends_gradients(node, output))
    return trained


def padding_exactly(export: Export) -> AbstractContextManager[Any]:
    """Replace torch.nn.functional.pad for an export.

    While open, pad concatenates integers with constants, and crops by slices.
    """
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
        # The clone of an unpadded tensor is a new tensor, as pad's result always is.
        if x.is_floating_point() or x.dtype == torch.bool:
            return plain(x, amounts, mode, value) if any(amounts) else x.clone()
        for place in range(0, len(amounts), 2):
            # Amounts are listed in pairs from the last dimension backwards.
            axis = x.dim() - 1 - place // 2
            # The sum over the axis gives the slice's shape without a size that the trace would fix.
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
    """Return the part that negative amounts leave.

    ORT's Pad reads outside of a tensor if the amounts leave nothing of it.
    """
    parts = [slice(None)] * x.dim()
    for place in range(0, len(amounts), 2):
        before, after = amounts[place : place + 2]
        parts[x.dim() - 1 - place // 2] = slice(max(0, -before), min(0, after) or None)
    return x[tuple(parts)] if min(amounts, default=0) < 0 else x

"""Tensors without a gradient that a graph uses more than once, and ORT's names of gradients.

Such tensors are zeros to pad with, a buffer, a frozen weight or the batch.

ORT's gradient of a Concat names a gradient for each of its inputs, needed or not; those of a
BatchNormalization and a LayerNormalization do so for the input, scale and bias, also where ORT makes
the node of a normalization that is written out. ORT adds up the gradients of a trained input. For
another input, two results would have one name, and the build fails. In the graph that ORT gets,
each use reads its own slice of the tensor. The slice is the whole tensor and begins at a unique
position before the first element, because ORT would merge equal slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.gradients import trained_values
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
    trained = trained_values(export, graph)
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

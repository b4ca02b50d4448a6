"""Repair the gradient of a tensor that is split into parts, if some parts have no gradient.

A part has no gradient if nothing uses it, or if only `detach` or a comparison does. ORT's gradient
of a Split joins the gradients of the other parts, so that it is too short. There are two cases:

- A Split in the model is replaced by a Slice for each part. A Slice has its own gradient.
- ORT's optimizer would make a Split of the model's own Slice and Gather nodes, if these are along
  one dimension and cover the tensor. Those without a gradient read the tensor through a Reshape,
  which the optimizer does not recognize.

For the same reason each Slice of the first case is along two dimensions, the second one in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ortlaunch.ortmodule.base import patching
from ortlaunch.ortmodule.base.gradients import reached
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.source_guard import TRANSITION, owner
from ortlaunch.ortmodule.graph_repairs.broadcasts import hide

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

# The largest int64: ONNX's end of a slice up to the end.
_END = 2**63 - 1


def cut_unequal_parts() -> None:
    """Install the repair: it runs after ORT infers the shapes of an exported model."""
    patching.wrap_method(owner(TRANSITION), "_infer_shapes", _with_parts)


def _with_parts(original: AnyFunction, model: onnx.ModelProto) -> object:
    """Infer the shapes, then replace nodes that select parts of which only some have a gradient."""
    inferred = original(model)
    graph = inferred.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    ranks = {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    # Names of tensors that may have a gradient.
    derived = reached(graph)
    uses: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type in ("Slice", "Gather"):
            uses.setdefault(node.input[0], []).append(node)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += _parts(node, ranks, derived, uses)
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)
    return inferred


def _parts(
    node: onnx.NodeProto,
    ranks: Mapping[str, int],
    derived: set[str],
    uses: Mapping[str, list[onnx.NodeProto]],
) -> list[onnx.NodeProto]:
    rank = ranks.get(node.input[0]) if node.input else None
    if rank is None:
        return [node]
    if node.op_type == "Split" and len(node.input) > 1:
        return [node] if _alike(node.output, derived) else _cut_all(node, rank)
    if node.op_type in ("Slice", "Gather") and node.output[0] not in derived:
        others = [name for other in uses[node.input[0]] for name in other.output]
        return [node] if _alike(others, derived) else [*hide(node, 0), node]
    return [node]


def _alike(names: Any, derived: set[str]) -> bool:
    """Return whether all parts have a gradient, or none has."""
    return len({name in derived for name in names}) < 2


def _cut_all(split: onnx.NodeProto, rank: int) -> list[onnx.NodeProto]:
    """Return a Slice for each part; it begins where the part before it ends."""
    axis = next((attribute.i for attribute in split.attribute if attribute.name == "axis"), 0)
    start = f"{split.output[0]}_ortlaunch_0"
    nodes = _zero_if_complete(split, axis % rank, start)
    for number, part in enumerate(split.output, 1):
        end = f"{split.output[0]}_ortlaunch_{number}"
        nodes += _sum(split, number, end)
        nodes += _cut(split.input[0], part, axis % rank, rank, start, end)
        start = end
    return nodes


def _zero_if_complete(split: onnx.NodeProto, axis: int, made: str) -> list[onnx.NodeProto]:
    """Return nodes that compute 0, the start of the first part.

    They fail if the sizes of the parts do not add up to the dimension. A Split fails then, too,
    but slices would silently be shorter. state/unsupported.py recognizes the error by the name of
    the node that fails, `..._filled`.
    """
    return [
        *_sum(split, len(split.output), f"{made}_total"),
        _node("Shape", [split.input[0]], f"{made}_shape"),
        _constant(f"{made}_axis", [axis]),
        _node("Gather", [f"{made}_shape", f"{made}_axis"], f"{made}_size"),
        # The difference is used as an index into a vector of one element: only 0 may be valid. It
        # is doubled, because -1 would be valid, too.
        _node("Sub", [f"{made}_size", f"{made}_total"], f"{made}_rest"),
        _node("Add", [f"{made}_rest", f"{made}_rest"], f"{made}_index"),
        _constant(f"{made}_zero", [0]),
        _node("Gather", [f"{made}_zero", f"{made}_index"], f"{made}_filled"),
        _node("Identity", [f"{made}_filled"], made),
    ]


def _sum(split: onnx.NodeProto, number: int, made: str) -> list[onnx.NodeProto]:
    """Return nodes that add up the sizes of the first `number` parts."""
    return [
        _constant(f"{made}_these", [int(place < number) for place in range(len(split.output))]),
        _node("Mul", [split.input[1], f"{made}_these"], f"{made}_sizes"),
        _node("ReduceSum", [f"{made}_sizes"], made),
    ]


def _cut(given: str, made: str, axis: int, rank: int, start: str, end: str) -> list[onnx.NodeProto]:
    """Return nodes that slice from `start` to `end` along the axis, and in full along another one.

    A vector gets a second dimension for the slice.
    """
    other = (axis + 1) % max(rank, 2)
    nodes = [
        _constant(f"{made}_first", [0]),
        _constant(f"{made}_last", [_END]),
        _constant(f"{made}_axes", [axis, other]),
        _node("Concat", [start, f"{made}_first"], f"{made}_starts", axis=0),
        _node("Concat", [end, f"{made}_last"], f"{made}_ends", axis=0),
    ]
    bounds = [f"{made}_starts", f"{made}_ends", f"{made}_axes"]
    if rank > 1:
        return [*nodes, _node("Slice", [given, *bounds], made)]
    return [
        *nodes,
        _constant(f"{made}_added", [1]),
        _node("Unsqueeze", [given, f"{made}_added"], f"{made}_wider"),
        _node("Slice", [f"{made}_wider", *bounds], f"{made}_cut"),
        _node("Squeeze", [f"{made}_cut", f"{made}_added"], made),
    ]


def _node(operator: str, given: list[str], made: str, axis: int | None = None) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node(operator, given, [made], made, axis=axis)


def _constant(name: str, numbers: list[int]) -> onnx.NodeProto:
    from onnx import TensorProto, helper

    value = helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers)
    return helper.make_node("Constant", [], [name], value=value)

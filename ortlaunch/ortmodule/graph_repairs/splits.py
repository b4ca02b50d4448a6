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
from ortlaunch.ortmodule.base.gradients import names_reached_by_gradient
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.source_guard import TRANSITION, function_owner
from ortlaunch.ortmodule.graph_repairs.broadcasts import hide_shape

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

# The largest int64: ONNX's end of a slice up to the end.
_END = 2**63 - 1


def cut_unequal_parts() -> None:
    """Install the repair: it runs after ORT infers the shapes of an exported model."""
    patching.wrap_method(function_owner(TRANSITION), "_infer_shapes", _infer_and_cut_parts)


def _infer_and_cut_parts(original: AnyFunction, model: onnx.ModelProto) -> object:
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
    names_with_gradient = names_reached_by_gradient(graph)
    readers_by_name: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type in ("Slice", "Gather"):
            readers_by_name.setdefault(node.input[0], []).append(node)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += _nodes_for_part(node, ranks, names_with_gradient, readers_by_name)
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)
    return inferred


def _nodes_for_part(
    node: onnx.NodeProto,
    ranks: Mapping[str, int],
    names_with_gradient: set[str],
    readers_by_name: Mapping[str, list[onnx.NodeProto]],
) -> list[onnx.NodeProto]:
    rank = ranks.get(node.input[0]) if node.input else None
    if rank is None:
        return [node]
    if node.op_type == "Split" and len(node.input) > 1:
        return (
            [node]
            if _all_or_none_derived(node.output, names_with_gradient)
            else _slices_for_split(node, rank)
        )
    if node.op_type in ("Slice", "Gather") and node.output[0] not in names_with_gradient:
        sibling_names = [
            name for sibling in readers_by_name[node.input[0]] for name in sibling.output
        ]
        return (
            [node]
            if _all_or_none_derived(sibling_names, names_with_gradient)
            else [*hide_shape(node, 0), node]
        )
    return [node]


def _all_or_none_derived(part_names: Any, names_with_gradient: set[str]) -> bool:
    """Return whether all parts have a gradient, or none has."""
    return len({name in names_with_gradient for name in part_names}) < 2


def _slices_for_split(split_node: onnx.NodeProto, rank: int) -> list[onnx.NodeProto]:
    """Return a Slice for each part; it begins where the part before it ends."""
    axis = next((attribute.i for attribute in split_node.attribute if attribute.name == "axis"), 0)
    start = f"{split_node.output[0]}_ortlaunch_0"
    nodes = _zero_start_nodes(split_node, axis % rank, start)
    for part_number, part in enumerate(split_node.output, 1):
        end = f"{split_node.output[0]}_ortlaunch_{part_number}"
        nodes += _size_sum_nodes(split_node, part_number, end)
        nodes += _slice_nodes(split_node.input[0], part, axis % rank, rank, start, end)
        start = end
    return nodes


def _zero_start_nodes(
    split_node: onnx.NodeProto, axis: int, output_name: str
) -> list[onnx.NodeProto]:
    """Return nodes that compute 0, the start of the first part.

    They fail if the sizes of the parts do not add up to the dimension. A Split fails then, too,
    but slices would silently be shorter. state/unsupported.py recognizes the error by the name of
    the node that fails, `..._filled`.
    """
    return [
        *_size_sum_nodes(split_node, len(split_node.output), f"{output_name}_total"),
        _make_node("Shape", [split_node.input[0]], f"{output_name}_shape"),
        _int64_constant(f"{output_name}_axis", [axis]),
        _make_node(
            "Gather", [f"{output_name}_shape", f"{output_name}_axis"], f"{output_name}_size"
        ),
        # The difference is used as an index into a vector of one element: only 0 may be valid. It
        # is doubled, because -1 would be valid, too.
        _make_node("Sub", [f"{output_name}_size", f"{output_name}_total"], f"{output_name}_rest"),
        _make_node("Add", [f"{output_name}_rest", f"{output_name}_rest"], f"{output_name}_index"),
        _int64_constant(f"{output_name}_zero", [0]),
        _make_node(
            "Gather", [f"{output_name}_zero", f"{output_name}_index"], f"{output_name}_filled"
        ),
        _make_node("Identity", [f"{output_name}_filled"], output_name),
    ]


def _size_sum_nodes(
    split_node: onnx.NodeProto, part_count: int, output_name: str
) -> list[onnx.NodeProto]:
    """Return nodes that add up the sizes of the first `part_count` parts."""
    return [
        _int64_constant(
            f"{output_name}_these",
            [int(part_index < part_count) for part_index in range(len(split_node.output))],
        ),
        _make_node("Mul", [split_node.input[1], f"{output_name}_these"], f"{output_name}_sizes"),
        _make_node("ReduceSum", [f"{output_name}_sizes"], output_name),
    ]


def _slice_nodes(
    input_name: str, output_name: str, axis: int, rank: int, start_name: str, end_name: str
) -> list[onnx.NodeProto]:
    """Return nodes that slice from `start_name` to `end_name` along the axis, and in full along another one.

    A vector gets a second dimension for the slice.
    """
    other_axis = (axis + 1) % max(rank, 2)
    nodes = [
        _int64_constant(f"{output_name}_first", [0]),
        _int64_constant(f"{output_name}_last", [_END]),
        _int64_constant(f"{output_name}_axes", [axis, other_axis]),
        _make_node("Concat", [start_name, f"{output_name}_first"], f"{output_name}_starts", axis=0),
        _make_node("Concat", [end_name, f"{output_name}_last"], f"{output_name}_ends", axis=0),
    ]
    bounds = [f"{output_name}_starts", f"{output_name}_ends", f"{output_name}_axes"]
    if rank > 1:
        return [*nodes, _make_node("Slice", [input_name, *bounds], output_name)]
    return [
        *nodes,
        _int64_constant(f"{output_name}_added", [1]),
        _make_node("Unsqueeze", [input_name, f"{output_name}_added"], f"{output_name}_wider"),
        _make_node("Slice", [f"{output_name}_wider", *bounds], f"{output_name}_cut"),
        _make_node("Squeeze", [f"{output_name}_cut", f"{output_name}_added"], output_name),
    ]


def _make_node(
    operator: str, input_names: list[str], output_name: str, axis: int | None = None
) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node(operator, input_names, [output_name], output_name, axis=axis)


def _int64_constant(name: str, values: list[int]) -> onnx.NodeProto:
    from onnx import TensorProto, helper

    value = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
    return helper.make_node("Constant", [], [name], value=value)

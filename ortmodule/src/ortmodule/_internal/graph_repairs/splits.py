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

from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, TRANSITION, repair
from ortmodule._internal.base.trained_names import value_names_reached_by_gradient_of_outputs
from ortmodule._internal.graph_repairs.broadcasts import redirect_input_and_create_reshape_nodes

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction

# The largest int64: ONNX's end of a slice up to the end.
_END = 2**63 - 1


@repair(
    "slice_partly_derived_splits",
    "install",
    130,
    replaces=f"{TRANSITION}._infer_shapes",
    fault="Where a part of `h.chunk(2, -1)`, a slice or a pick is detached, compared or unused, "
    "the gradient of `h` has another size: it ends the pass, or is broadcast to other numbers.",
    example="graph_repairs/test_splits.py::test_parts_have_eagers_gradients[one of six, in the middle]",
    sources=EXPORT_SOURCES,
)
def _infer_shapes_and_rewrite_partly_derived_splits(
    original_infer: AnyFunction, model: onnx.ModelProto
) -> object:
    """Infer the shapes, then replace nodes that select parts of which only some have a gradient."""
    inferred = original_infer(model)
    graph = inferred.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    ranks = {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
    # Names of tensors that may have a gradient.
    names_with_gradient = value_names_reached_by_gradient_of_outputs(graph)
    readers_by_name: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type in ("Slice", "Gather"):
            readers_by_name.setdefault(node.input[0], []).append(node)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += _nodes_replacing_split_if_partly_derived(
            node, ranks, names_with_gradient, readers_by_name
        )
    if len(nodes) != len(graph.node):
        replace_and_name_graph_nodes(graph, nodes)
    return inferred


def _nodes_replacing_split_if_partly_derived(
    onnx_node: onnx.NodeProto,
    rank_by_name: Mapping[str, int],
    names_with_gradient: set[str],
    slices_and_gathers_by_input: Mapping[str, list[onnx.NodeProto]],
) -> list[onnx.NodeProto]:
    rank = rank_by_name.get(onnx_node.input[0]) if onnx_node.input else None
    if rank is None:
        return [onnx_node]
    if onnx_node.op_type == "Split" and len(onnx_node.input) > 1:
        return (
            [onnx_node]
            if _have_all_or_no_gradient(onnx_node.output, names_with_gradient)
            else _create_slice_nodes_for_split(onnx_node, rank)
        )
    if onnx_node.op_type in ("Slice", "Gather") and onnx_node.output[0] not in names_with_gradient:
        sibling_names = [
            name
            for sibling in slices_and_gathers_by_input[onnx_node.input[0]]
            for name in sibling.output
        ]
        return (
            [onnx_node]
            if _have_all_or_no_gradient(sibling_names, names_with_gradient)
            else [*redirect_input_and_create_reshape_nodes(onnx_node, 0), onnx_node]
        )
    return [onnx_node]


def _have_all_or_no_gradient(part_names: Any, names_with_gradient: set[str]) -> bool:
    return len({name in names_with_gradient for name in part_names}) < 2


def _create_slice_nodes_for_split(
    split_node: onnx.NodeProto, input_rank: int
) -> list[onnx.NodeProto]:
    """Return a Slice for each part; it begins where the part before it ends."""
    axis = next((attribute.i for attribute in split_node.attribute if attribute.name == "axis"), 0)
    start = f"{split_node.output[0]}_ortmodule_0"
    nodes = _create_zero_start_nodes_that_check_sizes(split_node, axis % input_rank, start)
    for part_number, part in enumerate(split_node.output, 1):
        end = f"{split_node.output[0]}_ortmodule_{part_number}"
        nodes += _create_sum_nodes_of_first_part_sizes(split_node, part_number, end)
        nodes += _create_slice_nodes_over_two_axes(
            split_node.input[0], part, axis % input_rank, input_rank, start, end
        )
        start = end
    return nodes


def _create_zero_start_nodes_that_check_sizes(
    split_node: onnx.NodeProto, split_axis: int, output_name: str
) -> list[onnx.NodeProto]:
    """Return nodes that compute 0, the start of the first part.

    They fail if the sizes of the parts do not add up to the dimension. A Split fails then, too,
    but slices would silently be shorter. state/unsupported.py recognizes the error by the name of
    the node that fails, `..._filled`.
    """
    return [
        *_create_sum_nodes_of_first_part_sizes(
            split_node, len(split_node.output), f"{output_name}_total"
        ),
        _create_node_named_by_output("Shape", [split_node.input[0]], f"{output_name}_shape"),
        _create_int64_constant_node(f"{output_name}_axis", [split_axis]),
        _create_node_named_by_output(
            "Gather", [f"{output_name}_shape", f"{output_name}_axis"], f"{output_name}_size"
        ),
        # The difference is used as an index into a vector of one element: only 0 may be valid. It
        # is doubled, because -1 would be valid, too.
        _create_node_named_by_output(
            "Sub", [f"{output_name}_size", f"{output_name}_total"], f"{output_name}_rest"
        ),
        _create_node_named_by_output(
            "Add", [f"{output_name}_rest", f"{output_name}_rest"], f"{output_name}_index"
        ),
        _create_int64_constant_node(f"{output_name}_zero", [0]),
        _create_node_named_by_output(
            "Gather", [f"{output_name}_zero", f"{output_name}_index"], f"{output_name}_filled"
        ),
        _create_node_named_by_output("Identity", [f"{output_name}_filled"], output_name),
    ]


def _create_sum_nodes_of_first_part_sizes(
    split_node: onnx.NodeProto, summed_part_count: int, output_name: str
) -> list[onnx.NodeProto]:
    return [
        _create_int64_constant_node(
            f"{output_name}_these",
            [int(part_index < summed_part_count) for part_index in range(len(split_node.output))],
        ),
        _create_node_named_by_output(
            "Mul", [split_node.input[1], f"{output_name}_these"], f"{output_name}_sizes"
        ),
        _create_node_named_by_output("ReduceSum", [f"{output_name}_sizes"], output_name),
    ]


def _create_slice_nodes_over_two_axes(
    input_name: str,
    output_name: str,
    sliced_axis: int,
    input_rank: int,
    start_name: str,
    end_name: str,
) -> list[onnx.NodeProto]:
    """Return nodes that slice from `start_name` to `end_name` along the axis, and in full along another one.

    A vector gets a second dimension for the slice.
    """
    other_axis = (sliced_axis + 1) % max(input_rank, 2)
    nodes = [
        _create_int64_constant_node(f"{output_name}_first", [0]),
        _create_int64_constant_node(f"{output_name}_last", [_END]),
        _create_int64_constant_node(f"{output_name}_axes", [sliced_axis, other_axis]),
        _create_node_named_by_output(
            "Concat", [start_name, f"{output_name}_first"], f"{output_name}_starts", axis=0
        ),
        _create_node_named_by_output(
            "Concat", [end_name, f"{output_name}_last"], f"{output_name}_ends", axis=0
        ),
    ]
    bounds = [f"{output_name}_starts", f"{output_name}_ends", f"{output_name}_axes"]
    if input_rank > 1:
        return [*nodes, _create_node_named_by_output("Slice", [input_name, *bounds], output_name)]
    return [
        *nodes,
        _create_int64_constant_node(f"{output_name}_added", [1]),
        _create_node_named_by_output(
            "Unsqueeze", [input_name, f"{output_name}_added"], f"{output_name}_wider"
        ),
        _create_node_named_by_output(
            "Slice", [f"{output_name}_wider", *bounds], f"{output_name}_cut"
        ),
        _create_node_named_by_output(
            "Squeeze", [f"{output_name}_cut", f"{output_name}_added"], output_name
        ),
    ]


def _create_node_named_by_output(
    operator_type: str, input_names: list[str], output_name: str, axis: int | None = None
) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node(operator_type, input_names, [output_name], output_name, axis=axis)


def _create_int64_constant_node(output_name: str, integers: list[int]) -> onnx.NodeProto:
    from onnx import TensorProto, helper

    value = helper.make_tensor(output_name, TensorProto.INT64, [len(integers)], integers)
    return helper.make_node("Constant", [], [output_name], value=value)

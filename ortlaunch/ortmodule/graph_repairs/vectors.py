"""Keep dimensions that vanish and that ORT loses: of vectors, of single picks, of sums to a scalar.

`x @ v`: ORT derives it as if the vector were a matrix, and the gradient is wrong. `layer(x)[:, 0]`:
ORT's compute optimizer picks from a factor instead of the product, and the result keeps a size of 1
or gets another shape. It does the same before a transpose, as in `lstm(x)[0][:, -1]`, and before a
broadcast, as in `(x + x.mean(1, keepdim=True))[:, 0]`, where only the first use of the result loses
the size of 1. In the graph that ORT gets, a vector becomes a matrix of one row or column, a pick
becomes one of a list of one index, and the size of 1 is removed from the result.

`(x + table)[:, :2]`: from a table of fewer dimensions, ORT's compute optimizer picks along the axis
of the same number, which is another dimension. So the table gets leading sizes of 1.

`x.sum((0, 1)).sqrt()`: the gradient of a scalar's Sqrt has one dimension, at which the gradient of
a sum over listed dimensions fails; so the sum lists none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base import patching
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.source_guard import TRANSITION, function_owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

# The axis added to a vector on the left and on the right, and its place in the product.
_NEW_AXIS = (0, 1)
_PRODUCT_AXIS = (-2, -1)
# The operators of two inputs before which ORT's compute optimizer moves a pick.
_PASSED_OPERATORS = ("Add", "Div")


def keep_vanishing_sizes() -> None:
    """Rewrite products by a vector and picks from a computed tensor.

    ORT's gradient of the former and its value of the latter are wrong, without an error.
    """
    patching.wrap_method(function_owner(TRANSITION), "_infer_shapes", _infer_and_keep_sizes_of_one)


def _infer_and_keep_sizes_of_one(original: AnyFunction, model: onnx.ModelProto) -> object:
    """Infer the shapes, then rewrite the nodes that lose a dimension."""
    inferred = original(model)
    graph = inferred.graph
    nodes = []
    values = (*graph.input, *graph.value_info, *graph.output)
    rank_by_name = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }
    rank_by_name.update({tensor.name: len(tensor.dims) for tensor in graph.initializer})
    # ORT recognizes a pick from a Shape in its own form only.
    computed_names = {
        name for node in graph.node if node.op_type != "Shape" for name in node.output
    }
    for node in graph.node:
        if node.op_type == "MatMul":
            nodes += _product_of_matrices(node, rank_by_name)
        elif (
            node.op_type == "Gather"
            and node.input[0] in computed_names
            and rank_by_name.get(node.input[1]) == 0
        ):
            # A scalar index removes the dimension.
            nodes += _pick_by_index_list(node)
        elif node.op_type in _PASSED_OPERATORS:
            nodes += _nodes_with_equal_ranks(node, rank_by_name)
        else:
            if (
                node.op_type in ("ReduceSum", "ReduceMean")
                and rank_by_name.get(node.output[0]) == 0
            ):
                _remove_axes(node)
            nodes.append(node)
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)
    return inferred


def _product_of_matrices(
    node: onnx.NodeProto, rank_by_name: Mapping[str, int]
) -> list[onnx.NodeProto]:
    """Return a product between nodes that add a size of 1 to each vector and remove it again."""
    vector_positions = [
        position for position in (0, 1) if rank_by_name.get(node.input[position]) == 1
    ]
    if not vector_positions:
        return [node]
    nodes_before: list[onnx.NodeProto] = []
    for position in vector_positions:
        name = f"{node.output[0]}_ortlaunch_matrix_{position}"
        nodes_before += _reshape_nodes(
            "Unsqueeze", node.input[position], name, [_NEW_AXIS[position]]
        )
        node.input[position] = name
    result_name, node.output[0] = node.output[0], f"{node.output[0]}_ortlaunch_product"
    return [
        *nodes_before,
        node,
        *_reshape_nodes(
            "Squeeze",
            node.output[0],
            result_name,
            [_PRODUCT_AXIS[position] for position in vector_positions],
        ),
    ]


def _nodes_with_equal_ranks(
    node: onnx.NodeProto, rank_by_name: Mapping[str, int]
) -> list[onnx.NodeProto]:
    """Return a sum or quotient whose inputs have as many dimensions as each other.

    A vector stays: ORT picks from its last dimension only, and recognizes it as a bias.
    """
    input_ranks = [rank_by_name.get(name, 0) for name in node.input]
    smaller_position = input_ranks.index(min(input_ranks))
    missing_count = max(input_ranks) - input_ranks[smaller_position]
    if input_ranks[smaller_position] < 2 or not missing_count:
        return [node]
    name = f"{node.output[0]}_ortlaunch_whole"
    nodes_before = _reshape_nodes(
        "Unsqueeze", node.input[smaller_position], name, list(range(missing_count))
    )
    node.input[smaller_position] = name
    return [*nodes_before, node]


def _remove_axes(node: onnx.NodeProto) -> None:
    """Make a sum or mean over all dimensions without a list of them."""
    # ReduceSum takes the axes as an input since opset 13, ReduceMean since 18; an attribute before.
    del node.input[1:]
    kept_attributes = [attribute for attribute in node.attribute if attribute.name != "axes"]
    del node.attribute[:]
    node.attribute.extend(kept_attributes)


def _pick_by_index_list(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a pick by a list of one index, whose size of 1 is removed again."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    index_name = f"{node.output[0]}_ortlaunch_index"
    nodes_before = _reshape_nodes("Unsqueeze", node.input[1], index_name, [0])
    node.input[1] = index_name
    result_name, node.output[0] = node.output[0], f"{node.output[0]}_ortlaunch_picked"
    return [*nodes_before, node, *_reshape_nodes("Squeeze", node.output[0], result_name, [axis])]


def _reshape_nodes(
    operator: str, input_name: str, output_name: str, axes: list[int]
) -> list[onnx.NodeProto]:
    from onnx import TensorProto, helper

    value = helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)
    return [
        helper.make_node("Constant", [], [f"{output_name}_axes"], value=value),
        helper.make_node(operator, [input_name, f"{output_name}_axes"], [output_name]),
    ]

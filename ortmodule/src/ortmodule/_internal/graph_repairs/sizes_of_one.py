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

from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, TRANSITION, repair

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction

# The axis added to a vector on the left and on the right, and its place in the product.
_NEW_AXIS = (0, 1)
_PRODUCT_AXIS = (-2, -1)
# The operators of two inputs before which ORT's compute optimizer moves a pick.
_PASSED_OPERATORS = ("Add", "Div")


@repair(
    "keep_sizes_of_one",
    "install",
    120,
    replaces=f"{TRANSITION}._infer_shapes",
    fault="The gradient of a product by a vector is another vector's, and a pick from a computed "
    "tensor, such as `head(x)[:, 0]`, has another shape (a loss of 10.3 instead of 11.9) or "
    "ends the pass.",
    example="graph_repairs/test_vectors.py::test_a_vectors_gradient_is_eagers[matrix, vector]",
    sources=EXPORT_SOURCES,
)
def _infer_shapes_and_rewrite_nodes_losing_dimension(
    original_infer: AnyFunction, model: onnx.ModelProto
) -> object:
    inferred = original_infer(model)
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
            nodes += _rewrite_matmul_with_unsqueezed_vectors(node, rank_by_name)
        elif (
            node.op_type == "Gather"
            and node.input[0] in computed_names
            and rank_by_name.get(node.input[1]) == 0
        ):
            # A scalar index removes the dimension.
            nodes += _gather_by_index_list_and_squeeze(node)
        elif node.op_type in _PASSED_OPERATORS:
            nodes += _unsqueeze_matrix_of_smaller_rank(node, rank_by_name)
        else:
            if (
                node.op_type in ("ReduceSum", "ReduceMean")
                and rank_by_name.get(node.output[0]) == 0
            ):
                _remove_list_of_reduced_axes(node)
            nodes.append(node)
    if len(nodes) != len(graph.node):
        replace_and_name_graph_nodes(graph, nodes)
    return inferred


def _rewrite_matmul_with_unsqueezed_vectors(
    matmul_node: onnx.NodeProto, rank_by_name: Mapping[str, int]
) -> list[onnx.NodeProto]:
    """Return a product between nodes that add a size of 1 to each vector and remove it again."""
    vector_positions = [
        position for position in (0, 1) if rank_by_name.get(matmul_node.input[position]) == 1
    ]
    if not vector_positions:
        return [matmul_node]
    nodes_before: list[onnx.NodeProto] = []
    for position in vector_positions:
        name = f"{matmul_node.output[0]}_ortmodule_matrix_{position}"
        nodes_before += _create_squeeze_or_unsqueeze_nodes(
            "Unsqueeze", matmul_node.input[position], name, [_NEW_AXIS[position]]
        )
        matmul_node.input[position] = name
    result_name, matmul_node.output[0] = (
        matmul_node.output[0],
        f"{matmul_node.output[0]}_ortmodule_product",
    )
    return [
        *nodes_before,
        matmul_node,
        *_create_squeeze_or_unsqueeze_nodes(
            "Squeeze",
            matmul_node.output[0],
            result_name,
            [_PRODUCT_AXIS[position] for position in vector_positions],
        ),
    ]


def _unsqueeze_matrix_of_smaller_rank(
    add_or_divide_node: onnx.NodeProto, rank_by_name: Mapping[str, int]
) -> list[onnx.NodeProto]:
    """Return a sum or quotient whose inputs have as many dimensions as each other.

    A vector stays: ORT picks from its last dimension only, and recognizes it as a bias.
    """
    input_ranks = [rank_by_name.get(name, 0) for name in add_or_divide_node.input]
    smaller_position = input_ranks.index(min(input_ranks))
    missing_count = max(input_ranks) - input_ranks[smaller_position]
    if input_ranks[smaller_position] < 2 or not missing_count:
        return [add_or_divide_node]
    name = f"{add_or_divide_node.output[0]}_ortmodule_whole"
    nodes_before = _create_squeeze_or_unsqueeze_nodes(
        "Unsqueeze", add_or_divide_node.input[smaller_position], name, list(range(missing_count))
    )
    add_or_divide_node.input[smaller_position] = name
    return [*nodes_before, add_or_divide_node]


def _remove_list_of_reduced_axes(reduction_node: onnx.NodeProto) -> None:
    """Make a sum or mean over all dimensions without a list of them."""
    # ReduceSum takes the axes as an input since opset 13, ReduceMean since 18; an attribute before.
    del reduction_node.input[1:]
    kept_attributes = [
        attribute for attribute in reduction_node.attribute if attribute.name != "axes"
    ]
    del reduction_node.attribute[:]
    reduction_node.attribute.extend(kept_attributes)


def _gather_by_index_list_and_squeeze(gather_node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return a pick by a list of one index, whose size of 1 is removed again."""
    axis = next((attribute.i for attribute in gather_node.attribute if attribute.name == "axis"), 0)
    index_name = f"{gather_node.output[0]}_ortmodule_index"
    nodes_before = _create_squeeze_or_unsqueeze_nodes(
        "Unsqueeze", gather_node.input[1], index_name, [0]
    )
    gather_node.input[1] = index_name
    result_name, gather_node.output[0] = (
        gather_node.output[0],
        f"{gather_node.output[0]}_ortmodule_picked",
    )
    return [
        *nodes_before,
        gather_node,
        *_create_squeeze_or_unsqueeze_nodes("Squeeze", gather_node.output[0], result_name, [axis]),
    ]


def _create_squeeze_or_unsqueeze_nodes(
    operator_type: str, input_name: str, output_name: str, axes: list[int]
) -> list[onnx.NodeProto]:
    from onnx import TensorProto, helper

    value = helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)
    return [
        helper.make_node("Constant", [], [f"{output_name}_axes"], value=value),
        helper.make_node(operator_type, [input_name, f"{output_name}_axes"], [output_name]),
    ]

"""Products by a vector, `x @ v`: ORT derives them as if the vector were a matrix, and its gradient is another one's.

In the graph that ORT derives the vector becomes a matrix of one row or column, and the product loses that size again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ortlaunch.ortmodule import patching
from ortlaunch.ortmodule.graph import replace_nodes
from ortlaunch.ortmodule.source_guard import TRANSITION, owner

_NEW_AXIS = (0, 1)  # of a vector on the left, and on the right
_OF_PRODUCT = (-2, -1)


def multiply_vectors_as_matrices() -> None:
    """ORT's gradient of a product has the vector's numbers in other places, without a word."""
    patching.wrap_method(owner(TRANSITION), "_infer_shapes", _with_matrices)


def _with_matrices(original: Callable[..., Any], model: Any) -> Any:
    inferred = original(model)
    graph, nodes = inferred.graph, []
    values = (*graph.input, *graph.value_info, *graph.output)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values if _has_shape(value)}
    ranks.update({tensor.name: len(tensor.dims) for tensor in graph.initializer})
    for node in graph.node:
        nodes += _as_matrices(node, ranks) if node.op_type == "MatMul" else [node]
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)
    return inferred


def _has_shape(value: Any) -> bool:
    return bool(value.type.tensor_type.HasField("shape"))


def _as_matrices(node: Any, ranks: Mapping[str, int]) -> list[Any]:
    """The product, between nodes that give each vector a size of 1 and take it away again."""
    vectors = [place for place in (0, 1) if ranks.get(node.input[place]) == 1]
    if not vectors:
        return [node]
    before: list[Any] = []
    for place in vectors:
        name = f"{node.output[0]}_ortlaunch_matrix_{place}"
        before += _changed("Unsqueeze", node.input[place], name, [_NEW_AXIS[place]])
        node.input[place] = name
    result, node.output[0] = node.output[0], f"{node.output[0]}_ortlaunch_product"
    return [*before, node, *_changed("Squeeze", node.output[0], result, [_OF_PRODUCT[place] for place in vectors])]


def _changed(operator: str, given: str, made: str, axes: list[int]) -> list[Any]:
    from onnx import TensorProto, helper

    value = helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)
    return [
        helper.make_node("Constant", [], [f"{made}_axes"], value=value),
        helper.make_node(operator, [given, f"{made}_axes"], [made]),
    ]

"""Separate sizes in ORT's shape inference, where one may be 1 and the other not.

Where two tensors meet in a sum or product and ORT does not know their sizes, ORT assumes that the
sizes are equal. If one of them is 1, such as a size of a pool's output, the gradient of the
broadcast tensor is not summed up, and later nodes read beyond its memory. Here sizes are equal only
if they were equal in the batch of the export, as far as they follow from the model's inputs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal.base.attached import GraphInfoRecord, InferenceRecord
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import (
    EXPORT_SOURCES,
    SHAPES,
    TRANSITION,
    repair,
)

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import (
        AnyFunction,
        Args,
        GraphInfo,
        Kwargs,
        Manager,
        ShapeInference,
    )

# Key in the graph's metadata_props, which stay with the model through ORT's passes.
_SIZES_KEY = "ortmodule.sizes"
# ONNX operators that broadcast all of their inputs.
_BROADCASTING = {
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or",
    "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
ShapeByName = Mapping[str, Sequence[object] | None]


@repair(
    "keep_broadcast_sizes",
    "graph pass",
    40,
    fault="The gradient of a value that is broadcast is not summed up unless the graph contains "
    "the size 1: that of squeeze and excitation is 120 times too large, and an input of one "
    "row ends the pass or reads beyond a tensor.",
    example="graph_repairs/test_broadcasts.py::test_channels_are_weighed[adaptive]",
    sources={
        **EXPORT_SOURCES,
        f"{SHAPES}._broadcast_shapes": "8d6ef97161c5555a",
        f"{SHAPES}._check_merged_dims": "5e2c03720d3c04f4",
        f"{SHAPES}._infer_PythonOp": "31c2c03f6dede5b9",
        f"{SHAPES}._onnx_infer_single_node": "676f5d33dee7ee1b",
    },
)
def write_export_batch_sizes_into_metadata(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Write the sizes of this batch into the graph, by the names of its inputs' dimensions."""
    input_names = export_context.info.onnx_graph_input_names
    tensor_inputs = {
        name: value
        for name, value in zip(input_names, export_context.inputs)
        if isinstance(value, torch.Tensor)
    }
    sizes = {
        # The names by which ORT exports dynamic axes.
        f"{name}_dim{i}": size
        for name, value in tensor_inputs.items()
        for i, size in enumerate(value.shape)
    }
    exported_model.metadata_props.add(key=_SIZES_KEY, value=json.dumps(sizes))


@repair(
    "keep_broadcast_sizes",
    "install",
    110,
    replaces=f"{SHAPES}._broadcast_shapes",
)
def _broadcast_shape_with_new_symbols_if_may_differ(
    original_broadcast: AnyFunction,
    inference: ShapeInference,
    first_shape: Sequence[object],
    second_shape: Sequence[object],
) -> list[object]:
    """Return the sizes of two broadcast shapes; sizes that may differ get a new name."""
    # Shapes are aligned at the last dimension, and missing sizes are 1.
    rank = max(len(first_shape), len(second_shape))
    pairs = zip(
        [1] * (rank - len(first_shape)) + list(first_shape),
        [1] * (rank - len(second_shape)) + list(second_shape),
    )
    return [
        original_broadcast(inference, [size], [other])[0]
        if 1 in (size, other) or _are_equal_in_export_batch(inference, (size, other))
        else _create_or_get_symbol_for_either_size(inference, size, other)
        for size, other in pairs
    ]


@repair(
    "keep_broadcast_sizes",
    "install",
    110,
    replaces=f"{SHAPES}._check_merged_dims",
)
def _merge_sizes_unless_broadcast_may_differ(
    original_merge: AnyFunction,
    inference: ShapeInference,
    sizes_to_merge: Sequence[object],
    allow_broadcast: bool = True,
) -> None:
    """Merge sizes in ORT's inference only if they are known to be equal."""
    if not allow_broadcast or _are_equal_in_export_batch(
        inference, [dim for dim in sizes_to_merge if dim not in (0, 1)]
    ):
        original_merge(inference, sizes_to_merge, allow_broadcast=allow_broadcast)


@repair(
    "keep_broadcast_sizes",
    "install",
    110,
    replaces=f"{SHAPES}._onnx_infer_single_node",
)
def _infer_node_and_set_open_broadcast_sizes(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Infer a node, then set the sizes that the single node's inference leaves open.

    ORT would set them by merging the sizes of the inputs.
    """
    original_infer(inference, node)
    if node.op_type not in _BROADCASTING or node.output[0] not in inference.known_vi_:
        return
    tensor_type = inference.known_vi_[node.output[0]].type.tensor_type
    shapes = [inference._get_shape(node, position) for position in range(len(node.input))]
    if not tensor_type.HasField("shape") or any(shape is None or None in shape for shape in shapes):
        return
    sizes: list[object] = []
    for shape in shapes:
        sizes = inference._broadcast_shapes(sizes, shape)
    for dim, size in zip(tensor_type.shape.dim, sizes):
        if size is not None and not dim.dim_value and dim.dim_param not in inference.symbolic_dims_:
            dim.Clear()
            setattr(dim, "dim_param" if isinstance(size, str) else "dim_value", size)


@repair(
    "keep_broadcast_sizes",
    "install",
    110,
    replaces=f"{SHAPES}._infer_PythonOp",
)
def _infer_python_op_and_rename_later_output_sizes(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Infer a function's outputs, and name the sizes of each: ORT names those of all alike."""
    original_infer(inference, node)
    # The first output is the function's context.
    for output_index, name in enumerate(node.output[2:], 2):
        dims = inference.known_vi_[name].type.tensor_type.shape.dim
        for axis, dim in enumerate(dims):
            if dim.dim_param == str(inference._new_symbolic_dim_from_output(node, 0, axis)):
                new_name = inference._new_symbolic_dim_from_output(node, output_index, axis)
                dim.dim_param = str(new_name)


def _are_equal_in_export_batch(inference: ShapeInference, compared_sizes: Sequence[object]) -> bool:
    if len(set(compared_sizes)) < 2:
        return True
    values = [_size_in_export_batch_or_none(inference, dim) for dim in compared_sizes]
    return None not in values and len(set(values)) == 1


def _size_in_export_batch_or_none(inference: ShapeInference, symbolic_size: Any) -> int | None:
    """Return the value of a size in the batch of the export, or None if it is unknown."""
    if not isinstance(symbolic_size, str):
        return None if symbolic_size is None else int(symbolic_size)
    size_by_name = _read_and_cache_export_batch_size_by_dim_name(inference)
    if symbolic_size in size_by_name:
        return size_by_name[symbolic_size]
    # A computed size is a SymPy formula; its symbols are sizes of inputs.
    formula = inference.symbolic_dims_.get(symbolic_size)
    if formula is None or any(str(symbol) not in size_by_name for symbol in formula.free_symbols):
        return None
    return int(formula.subs({symbol: size_by_name[str(symbol)] for symbol in formula.free_symbols}))


def _read_and_cache_export_batch_size_by_dim_name(inference: ShapeInference) -> dict[str, int]:
    record = InferenceRecord.attached_to(inference)
    if record.batch_size_by_dim_name is None:
        metadata = {prop.key: prop.value for prop in inference.out_mp_.metadata_props}
        sizes: dict[str, int] = json.loads(metadata.get(_SIZES_KEY, "{}"))
        record.batch_size_by_dim_name = sizes
    return record.batch_size_by_dim_name


def _create_or_get_symbol_for_either_size(
    inference: ShapeInference, first_size: object, second_size: object
) -> str:
    """Return a symbolic size for a dimension that has one of two sizes."""
    sympy: Any = importlib.import_module("sympy")
    name_by_sizes = InferenceRecord.attached_to(inference).name_by_either_size
    # The same two sizes always give the same name, or equal results would count as different.
    name = name_by_sizes.setdefault(
        frozenset((first_size, second_size)), f"broadcast_size_{len(name_by_sizes)}"
    )
    inference.symbolic_dims_[name] = sympy.Symbol(name, integer=True, nonnegative=True)
    return name


# -------------------------------------------------------------------------------------------- in the graph


@repair(
    "keep_broadcast_sizes",
    "install",
    110,
    replaces=f"{TRANSITION}._infer_shapes",
)
def _infer_shapes_and_hide_those_that_may_broadcast(
    original_infer: AnyFunction, model: onnx.ModelProto
) -> object:
    """Hide shapes from ORT's gradient builder where sizes that may differ meet.

    If one of the shapes is unknown, ORT's gradient reads the sizes in each pass.
    """
    inferred = original_infer(model)
    graph = inferred.graph
    nodes = []
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    shape_by_name = {
        name: _size_numbers_or_names_or_none_without_shape(value) for name, value in values.items()
    }
    shape_by_name.update({tensor.name: list(tensor.dims) for tensor in graph.initializer})
    constant_names = {tensor.name for tensor in graph.initializer if tensor.name not in values}
    for node in graph.node:
        # Constants, shapes, and values computed from constants alone have no gradient.
        if node.op_type in ("Constant", "ConstantOfShape", "Shape") or (
            node.input and constant_names.issuperset(node.input)
        ):
            constant_names.update(node.output)
        for position in _positions_whose_shape_must_be_hidden_from_ort(node, shape_by_name):
            nodes += redirect_input_and_create_reshape_nodes(node, position)
        positions = [
            position
            for position in _positions_of_where_inputs_that_may_broadcast(node, shape_by_name)
            if node.input[position] not in constant_names
        ]
        if positions:
            nodes += _redirect_where_inputs_and_create_expand_nodes(node, positions, shape_by_name)
        nodes.append(node)
    if len(nodes) != len(graph.node):
        replace_and_name_graph_nodes(graph, nodes)
    return inferred


def redirect_input_and_create_reshape_nodes(
    reading_node: onnx.NodeProto, input_position: int
) -> list[onnx.NodeProto]:
    """Pass an input of a node through a Reshape to the shape that it has in each pass.

    The Reshape hides the shape from ORT, and changes no values.
    """
    from onnx import helper

    reshaped_name = f"{reading_node.output[0]}_ortmodule_{input_position}"
    input_name, reading_node.input[input_position] = (
        reading_node.input[input_position],
        reshaped_name,
    )
    return [
        helper.make_node("Shape", [input_name], [f"{reshaped_name}_shape"]),
        # Without allowzero, a size of 0 would mean "as in the input".
        helper.make_node(
            "Reshape", [input_name, f"{reshaped_name}_shape"], [reshaped_name], allowzero=1
        ),
    ]


def _positions_of_where_inputs_that_may_broadcast(
    onnx_node: onnx.NodeProto, shape_by_value_name: ShapeByName
) -> list[int]:
    """Return the inputs that a Where broadcasts or may broadcast.

    ORT's gradient for such an input has the size of the result.
    """
    if onnx_node.op_type != "Where":
        return []
    result_shape = shape_by_value_name.get(onnx_node.output[0])
    return [
        position
        for position in (1, 2)
        if result_shape is None
        or "" in result_shape
        or shape_by_value_name.get(onnx_node.input[position]) != result_shape
    ]


def _redirect_where_inputs_and_create_expand_nodes(
    where_node: onnx.NodeProto, input_positions: Sequence[int], shape_by_value_name: ShapeByName
) -> list[onnx.NodeProto]:
    """Broadcast these inputs of a Where before it, by a node whose gradient ORT sums up correctly."""
    from onnx import NodeProto, helper

    nodes = []
    shape_name = f"{where_node.output[0]}_ortmodule_shape"
    result_shape = shape_by_value_name.get(where_node.output[0])
    full_size_name = next(
        (
            name
            for name in where_node.input
            if result_shape is not None and shape_by_value_name.get(name) == result_shape
        ),
        None,
    )
    if full_size_name is None:
        # No input has the result's size, so a copy of the node computes the result for its shape.
        full_size_name = f"{where_node.output[0]}_ortmodule_whole"
        nodes.append(NodeProto())
        nodes[-1].CopyFrom(where_node)
        nodes[-1].output[0] = full_size_name
        nodes[-1].name = full_size_name
    nodes.append(helper.make_node("Shape", [full_size_name], [shape_name]))
    for position in input_positions:
        nodes += redirect_input_and_create_reshape_nodes(where_node, position)
        name = f"{where_node.input[position]}_expanded"
        nodes.append(helper.make_node("Expand", [where_node.input[position], shape_name], [name]))
        where_node.input[position] = name
    return nodes


def _size_numbers_or_names_or_none_without_shape(
    value_info: onnx.ValueInfoProto,
) -> list[str | int] | None:
    """Return the sizes of a value by number or name, "" for an unknown one; None without a shape."""
    tensor_type = value_info.type.tensor_type
    return (
        [dim.dim_value or dim.dim_param for dim in tensor_type.shape.dim]
        if tensor_type.HasField("shape")
        else None
    )


def _positions_whose_shape_must_be_hidden_from_ort(
    onnx_node: onnx.NodeProto, shape_by_value_name: ShapeByName
) -> list[int]:
    """Return the inputs whose shapes must be hidden because they may be broadcast.

    For most operators it is enough to hide one of two inputs.
    """
    operator = onnx_node.op_type
    if operator not in (_BROADCASTING - {"Where"}) | {"Expand", "MatMul"}:
        return []
    # The result's shape is that of the Expand; the input may be smaller.
    names = (
        [onnx_node.input[0], onnx_node.output[0]] if operator == "Expand" else [*onnx_node.input]
    )
    shapes = [shape for name in names if (shape := shape_by_value_name.get(name)) is not None]
    # The last two dimensions of a MatMul are not broadcast.
    batch_shapes = [shape[:-2] if operator == "MatMul" else shape for shape in shapes]
    if len(shapes) < len(names) or not _may_need_broadcast(*batch_shapes):
        return []
    if operator == "Expand":
        return [0]
    positions = range(len(names))
    if operator in ("Max", "Min"):
        # Their gradient compares each input with the result.
        return [*positions]
    # A shape of numbers alone cannot be hidden: ORT computes its Shape in advance.
    shown_position = next(
        (
            candidate
            for candidate in positions
            if all(isinstance(size, int) for size in batch_shapes[candidate])
        ),
        0,
    )
    return [position for position in positions if position != shown_position]


def _may_need_broadcast(*shapes: Sequence[object]) -> bool:
    """Return whether one size may be 1 where another is not, without a 1 in the graph."""
    rank = max(map(len, shapes))
    padded: list[list[object]] = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    sizes = [set(column) - {1} for column in zip(*padded)]
    return any(len(column) > 1 for column in sizes)


# ------------------------------------------------------------------------------------------- in later batches


def batch_has_one_where_graph_assumes_equal_sizes(
    graph_execution_manager: Manager, batch_args: Args, batch_kwargs: Kwargs
) -> bool:
    """Return whether this batch breaks an equality of sizes that the graph assumes.

    Sizes that were equal in the batch of the export differ in this batch, and one of them is 1. Both
    are sizes of inputs, or one is a number in the graph.
    """
    info = graph_execution_manager._graph_transition_manager._post_export_processed_model_info
    return any(
        _some_but_not_all_equal_sizes_are_one_in_batch(info, group, batch_args, batch_kwargs)
        for group in _find_and_cache_input_dims_assumed_equal(info)
    )


def _some_but_not_all_equal_sizes_are_one_in_batch(
    graph_info: GraphInfo,
    input_names_and_axes: Sequence[tuple[str, int]],
    batch_args: Args,
    batch_kwargs: Kwargs,
) -> bool:
    accessor_by_name = graph_info.onnx_graph_input_data_accessor_user_defined
    # The accessors read the batch's arguments in the form in which the caller passed them.
    values_and_axes = [
        (accessor_by_name[name](batch_args, batch_kwargs), axis)
        for name, axis in input_names_and_axes
    ]
    are_sizes_one = [
        value.shape[axis] == 1
        for value, axis in values_and_axes
        if isinstance(value, torch.Tensor) and value.dim() > axis
    ]
    # A dimension alone in its group was equal to a number above 1.
    return any(are_sizes_one) and (len(input_names_and_axes) == 1 or not all(are_sizes_one))


def _find_and_cache_input_dims_assumed_equal(graph_info: GraphInfo) -> list[list[tuple[str, int]]]:
    """Return the groups of dimensions of the model's inputs that its graph assumes to be equal.

    A dimension that it assumes to be equal to a number is a group of its own.
    """
    # Computed once for a graph: this runs before each pass.
    record = GraphInfoRecord.attached_to(graph_info)
    if record.equal_dims is None:
        dims_by_symbol: dict[str, list[tuple[str, int]]] = {}
        fixed_dims: list[list[tuple[str, int]]] = []
        for value in graph_info._post_export_processed_model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if value.name not in graph_info.onnx_graph_input_data_accessor_user_defined:
                    continue
                if dim.dim_param:
                    dims_by_symbol.setdefault(dim.dim_param, []).append((value.name, axis))
                elif dim.dim_value > 1:
                    fixed_dims.append([(value.name, axis)])
        equal = [group for group in dims_by_symbol.values() if len(group) > 1]
        record.equal_dims = [*equal, *fixed_dims]
    return record.equal_dims

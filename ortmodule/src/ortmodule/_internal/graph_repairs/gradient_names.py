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

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair
from ortmodule._internal.base.trained_names import names_of_trained_inputs_and_dependent_values

# Operators and positions of inputs for which ORT names a gradient, needed or not.
_GRADIENT_INPUTS = {
    "Concat": range(2**20),
    "BatchNormalization": range(3),
    "LayerNormalization": range(3),
}
# Operators with which a written-out RMSNorm or LayerNorm begins: ORT fuses it into one node.
_NORM_STARTS = {"Pow", "ReduceMean"}
# Start and end of a slice, beyond those of any tensor: a slice between them is the whole.
_SLICE_BEGIN = -(2**40)
_SLICE_END = 2**62


@repair(
    "concatenate_constants",
    "graph pass",
    50,
    fault="A constant, a buffer or a frozen value that meets something trained in two "
    "`torch.cat` or two normalizations (GPT-NeoX, ALBERT under LoRA) ends the build of the "
    "gradient (`Duplicate definition of name`).",
    example="graph_repairs/test_gradient_names.py::test_a_part_without_a_gradient_joins_several_times[a buffer]",
    sources=EXPORT_SOURCES,
)
def slice_repeated_constants(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Give each use of a tensor without a gradient its own slice.

    ORT failed where two nodes, or one node twice, use such a tensor in a Concat or a normalization.
    """
    # Without a backward pass no gradient gets a name.
    if not export_context.training:
        return
    graph = exported_model.graph
    trained_names = names_of_trained_inputs_and_dependent_values(export_context, graph)
    value_numbers = _value_number_by_untrained_name(graph, trained_names)
    gradient_uses = [
        (node, position)
        for node, position in _nodes_and_positions_of_listed_and_norm_inputs(graph)
        if node.input[position] not in trained_names
        and (node.op_type in _NORM_STARTS or trained_names.intersection(node.output))
    ]
    read_values = [
        value_numbers.get(node.input[position], node.input[position])
        for node, position in gradient_uses
    ]
    use_counts = Counter(read_values)
    positions_to_slice = {
        (node.output[0], position)
        for (node, position), value in zip(gradient_uses, read_values)
        # The nodes of a written-out normalization must read one tensor, or ORT does not fuse them.
        if node.op_type not in _NORM_STARTS
        # Every part of a Concat, in case ORT simplifies two computations to the same one. No test
        # needs this.
        and (node.op_type == "Concat" or use_counts[value] > 1)
    }
    if len(gradient_uses) > 1 and positions_to_slice:
        replace_and_name_graph_nodes(
            graph,
            _redirect_inputs_to_slices_and_list_all_nodes(
                graph, positions_to_slice, export_context.info.onnx_graph_input_names[0]
            ),
        )


def _value_number_by_untrained_name(
    onnx_graph: onnx.GraphProto, trained_names: set[str]
) -> dict[str, tuple[int, int]]:
    """Return the value number of each computed tensor without a gradient, by name.

    Tensors of equal computations have equal value numbers: ORT merges their nodes.
    """
    computations: dict[tuple[object, ...], int] = {}
    number_by_name: dict[str, tuple[int, int]] = {}
    for node in onnx_graph.node:
        if not trained_names.intersection(node.output):
            attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
            inputs = (number_by_name.get(name, name) for name in node.input)
            computation = (node.op_type, *inputs, *attributes)
            value_number = computations.setdefault(computation, len(computations))
            number_by_name.update(
                (name, (value_number, output_index))
                for output_index, name in enumerate(node.output)
            )
    return number_by_name


def _nodes_and_positions_of_listed_and_norm_inputs(
    onnx_graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes and positions of inputs for which ORT names a gradient."""
    node_by_output = {name: node for node in onnx_graph.node for name in node.output}
    scaled_names: set[str] = set()
    # Tensors of at least one dimension: a slice takes no scalar.
    vector_names = {value.name for value in onnx_graph.input if value.type.tensor_type.shape.dim}
    vector_names.update(tensor.name for tensor in onnx_graph.initializer if tensor.dims)
    for node in onnx_graph.node:
        positions = (
            range(1) if node.op_type in _NORM_STARTS else _GRADIENT_INPUTS.get(node.op_type, ())
        )
        yield from (
            (node, position) for position in range(len(node.input)) if position in positions
        )
        if node.op_type in {"Mul", "Add"}:
            # Scale and bias of a normalization that is written out.
            for position, (name, other) in enumerate(zip(node.input, reversed(node.input))):
                is_scale_or_bias = (
                    other in scaled_names
                    if node.op_type == "Add"
                    else _is_or_multiplies_quotient_by_square_root(node_by_output, other)
                )
                if is_scale_or_bias and name in vector_names:
                    scaled_names.update(node.output)
                    yield node, position
        # A scale may be computed, such as 1 + weight in Gemma.
        if vector_names.intersection(node.input) and node.op_type in {"Add", "Mul", "Exp", "Cast"}:
            vector_names.update(node.output)
        if node.op_type == "Constant" and node.attribute[0].t.dims:
            vector_names.update(node.output)


def _is_or_multiplies_quotient_by_square_root(
    node_by_output: Mapping[str, onnx.NodeProto], checked_value_name: str
) -> bool:
    """Return whether a value is a tensor divided by a root, which a Cast may follow."""
    missing_node = onnx.NodeProto()
    node = node_by_output.get(checked_value_name, missing_node)
    if node.op_type == "Cast":
        node = node_by_output.get(node.input[0], missing_node)
    # torch exports rsqrt as 1 / Sqrt.
    quotients = (
        [node_by_output.get(input_name, missing_node) for input_name in node.input]
        if node.op_type == "Mul"
        else [node]
    )
    return any(
        quotient.op_type == "Div"
        and node_by_output.get(quotient.input[1], missing_node).op_type == "Sqrt"
        for quotient in quotients
    )


def _redirect_inputs_to_slices_and_list_all_nodes(
    onnx_graph: onnx.GraphProto, positions_to_slice: set[tuple[str, int]], size_input_name: str
) -> list[onnx.NodeProto]:
    constant_nodes = [
        node
        for node in onnx_graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    ]
    dims_by_constant = {node.output[0]: node.attribute[0].t.dims for node in constant_nodes}
    dims_by_constant.update({tensor.name: tensor.dims for tensor in onnx_graph.initializer})
    nodes: list[onnx.NodeProto] = []
    for node in onnx_graph.node:
        for position, name in enumerate(node.input):
            if node.output and (node.output[0], position) in positions_to_slice:
                sliced_name = node.input[position] = f"{node.output[0]}_apart_{position}"
                if name in dims_by_constant:
                    nodes += _create_unfoldable_constant_slice_nodes(
                        name,
                        sliced_name,
                        _SLICE_BEGIN - len(nodes),
                        dims_by_constant[name],
                        size_input_name,
                    )
                else:
                    nodes += [
                        _create_int64_constant_node(
                            f"{sliced_name}_begin", _SLICE_BEGIN - len(nodes)
                        ),
                        *_create_axis_0_slice_to_end_nodes(name, sliced_name, sliced_name),
                    ]
        nodes.append(node)
    return nodes


def _create_axis_0_slice_to_end_nodes(
    source_name: str, sliced_name: str, output_name: str
) -> list[onnx.NodeProto]:
    slice_inputs = [
        source_name,
        f"{sliced_name}_begin",
        f"{sliced_name}_end",
        f"{sliced_name}_axis",
    ]
    return [
        _create_int64_constant_node(slice_inputs[2], _SLICE_END),
        _create_int64_constant_node(slice_inputs[3], 0),
        helper.make_node("Slice", slice_inputs, [output_name]),
    ]


def _create_unfoldable_constant_slice_nodes(
    constant_name: str,
    sliced_name: str,
    begin_position: int,
    constant_dims: Sequence[int],
    size_input_name: str,
) -> list[onnx.NodeProto]:
    """Return nodes that slice a constant from a position that is known only in a pass.

    With a known position ORT would compute the slice in advance, and merge equal results.
    """
    return [
        _create_int64_constant_node(f"{sliced_name}_before", begin_position),
        helper.make_node("Size", [size_input_name], [f"{sliced_name}_size"]),
        helper.make_node(
            "Add", [f"{sliced_name}_size", f"{sliced_name}_before"], [f"{sliced_name}_begin"]
        ),
        *_create_axis_0_slice_to_end_nodes(constant_name, sliced_name, f"{sliced_name}_slice"),
        _create_int64_constant_node(f"{sliced_name}_dims", *constant_dims),
        helper.make_node(
            "Reshape", [f"{sliced_name}_slice", f"{sliced_name}_dims"], [sliced_name], allowzero=1
        ),
    ]


def _create_int64_constant_node(output_name: str, *integers: int) -> onnx.NodeProto:
    value = helper.make_tensor("", TensorProto.INT64, [len(integers)], integers)
    return helper.make_node("Constant", [], [output_name], value=value)

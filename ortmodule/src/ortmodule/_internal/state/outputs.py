"""Outputs of an ORTModule in the dtypes that the model returns, unchanged by the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ortmodule._internal.base.attached import GraphInfoRecord
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import PROCESSED, TRAINING, repair

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, GraphInfo, Manager

# Operators that may return their first input's memory.
_SHARING_OPERATORS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
# Operators whose results have memory of their own; other ones may write theirs into an input's.
_OWN_MEMORY_OPERATORS = {
    "ATen",
    "PythonOp",
    "Shape",
    "Size",
    "Gather",
    "Slice",
    "MatMul",
    "FusedMatMul",
}


@repair(
    "restore_output_dtypes",
    "install",
    50,
    replaces=f"{PROCESSED}.restore_outputs",
    fault="On a CPU the result of `x.half().relu()` is float32.",
    example="state/test_outputs.py::test_types_are_eagers[True-relu of half]",
    sources={
        f"{PROCESSED}.restore_outputs": "faecc5bfae8ec00d",
    },
)
def _restore_outputs_in_model_dtypes(
    original_restore: AnyFunction, graph_info: GraphInfo, ort_outputs: Sequence[torch.Tensor]
) -> object:
    # Computed once for a graph: this runs in each pass.
    record = GraphInfoRecord.attached_to(graph_info)
    if record.output_dtypes is None:
        record.output_dtypes = _output_dtypes_with_none_for_unknown(
            graph_info._post_export_processed_model.graph
        )
    return original_restore(
        graph_info,
        [
            output.to(dtype) if dtype else output
            for output, dtype in zip(ort_outputs, record.output_dtypes)
        ],
    )


def _output_dtypes_with_none_for_unknown(onnx_graph: onnx.GraphProto) -> list[torch.dtype | None]:
    """Return the dtype of each output; None where the exporter does not know it."""
    from onnxruntime.training.utils import onnx_dtype_to_pytorch_dtype

    type_codes = [output.type.tensor_type.elem_type for output in onnx_graph.output]
    return [
        onnx_dtype_to_pytorch_dtype(type_code) if type_code else None for type_code in type_codes
    ]


@repair(
    "copy_shared_outputs",
    "install",
    170,
    replaces=f"{TRAINING}._build_graph",
    fault="A returned value that the loss uses has other numbers after `backward()`, which "
    "writes into its memory.",
    example="state/test_outputs.py::test_the_backward_pass_changes_no_output[probabilities]",
    sources={
        f"{TRAINING}._build_graph": "f83f91604f964faf",
    },
)
def _build_graph_and_copy_shared_outputs(
    original_build: AnyFunction, manager: Manager, *args: object
) -> None:
    original_build(manager, *args)
    _copy_outputs_whose_memory_backward_may_reuse(manager._onnx_models.optimized_model.graph)


def _copy_outputs_whose_memory_backward_may_reuse(training_graph: onnx.GraphProto) -> None:
    node_by_output = {name: node for node in training_graph.node for name in node.output}
    readers_by_name: dict[str, list[onnx.NodeProto]] = {}
    for node in training_graph.node:
        for name in node.input:
            readers_by_name.setdefault(name, []).append(node)

    def operators_reading_value(value_name: str, passed_operators: set[str]) -> set[str]:
        """Return the operators that read a value, or its memory through these operators."""
        operators: set[str] = set()
        for reader in readers_by_name.get(value_name, ()):
            shares = reader.op_type in passed_operators
            operators |= (
                operators_reading_value(reader.output[0], passed_operators)
                if shares
                else {reader.op_type}
            )
        return operators - {"YieldOp"}

    def is_memory_safe_in_backward(value_name: str) -> bool:
        # ORT's optimizer removes each Identity.
        while (maker := node_by_output.get(value_name)) and maker.op_type == "Identity":
            value_name = maker.input[0]
        is_apart = maker is not None and maker.op_type in _OWN_MEMORY_OPERATORS
        return not operators_reading_value(value_name, {"Identity"}) or (
            is_apart
            and operators_reading_value(value_name, _SHARING_OPERATORS) <= _OWN_MEMORY_OPERATORS
        )

    nodes = []
    for node in training_graph.node:
        for position, name in enumerate(node.input if node.op_type == "YieldOp" else ()):
            if not is_memory_safe_in_backward(name):
                node.input[position] = f"{name}_ortmodule_{position}"
                nodes += _create_tensor_copy_nodes(name, node.input[position])
        nodes.append(node)
    if len(nodes) > len(training_graph.node):
        replace_and_name_graph_nodes(training_graph, nodes)


def _create_tensor_copy_nodes(tensor_name: str, copy_name: str) -> list[onnx.NodeProto]:
    """Return nodes that copy a tensor of any type and rank: ORT would remove an Identity."""
    from onnx import TensorProto, helper

    axes, zero_index = (
        helper.make_tensor("zero", TensorProto.INT64, shape, [0]) for shape in ([1], [])
    )
    return [
        helper.make_node("Constant", [], [f"{copy_name}_axes"], value=axes),
        helper.make_node("Constant", [], [f"{copy_name}_first"], value=zero_index),
        helper.make_node("Unsqueeze", [tensor_name, f"{copy_name}_axes"], [f"{copy_name}_list"]),
        helper.make_node("Gather", [f"{copy_name}_list", f"{copy_name}_first"], [copy_name]),
    ]

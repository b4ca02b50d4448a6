"""The operators that have a kernel of ONNX Runtime's CUDA provider, and the kernels' types.

The table is cuda_kernels.txt; `tools/cuda_kernels.py` reads it from the wheel. Types are ONNX's
names in lower case; an empty string is an unknown type.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx

# The output types of operators whose output type does not follow from their inputs.
_OUTPUT_TYPES = {
    **dict.fromkeys(
        ("And", "Equal", "Greater", "IsInf", "IsNaN", "Less", "Not", "Or", "Xor"), "bool"
    ),
    **dict.fromkeys(("ArgMax", "ArgMin", "NonZero", "Shape", "Size"), "int64"),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), "bool"),
}


class OperatorKernels(NamedTuple):
    """The kernels of some versions of an operator."""

    first_version: int
    last_version: int
    """0: still current."""
    types: list[set[str]]
    """Of each kernel."""


def has_cuda_kernel_for_types(
    onnx_node: onnx.NodeProto, type_by_tensor_name: Mapping[str, str], onnx_opset: int
) -> bool:
    """Return whether an onnx.NodeProto can run on CUDA.

    Args:
        onnx_node: the operator's node.
        type_by_tensor_name: the types of the graph's tensors, by tensor name.
        onnx_opset: the version of ONNX's operators that the model uses.
    """
    node_types = [
        type_by_tensor_name.get(name, "") for name in (*onnx_node.input, *onnx_node.output) if name
    ]
    # int64 inputs after the first one are sizes and axes, which have constraints of their own.
    required_types = {
        *node_types[:1],
        *(type_name for type_name in node_types if type_name != "int64"),
    } - {""}
    # ORT's own operators (com.microsoft) have version 1 only.
    version = 1 if onnx_node.domain else onnx_opset
    return any(
        kernels.first_version <= version <= (kernels.last_version or version)
        and any("any" in types or required_types <= types for types in kernels.types)
        for kernels in _kernels_by_operator().get((onnx_node.domain, onnx_node.op_type), ())
    )


def declared_or_inferred_type_by_tensor_name(onnx_graph: onnx.GraphProto) -> dict[str, str]:
    """Return the types of the tensors of an onnx.GraphProto, by tensor name."""
    type_by_name = {
        value.name: _lower_case_type_name(value.type.tensor_type.elem_type)
        for value in (*onnx_graph.value_info, *onnx_graph.input, *onnx_graph.output)
    }
    type_by_name.update(
        {tensor.name: _lower_case_type_name(tensor.data_type) for tensor in onnx_graph.initializer}
    )
    for node in onnx_graph.node:
        # ORT omits tensors of unknown shape from value_info, so their types are inferred.
        for name in node.output[:1]:
            type_by_name[name] = type_by_name.get(name) or _infer_first_output_type_or_empty(
                node, type_by_name
            )
    return type_by_name


def _infer_first_output_type_or_empty(
    onnx_node: onnx.NodeProto, type_by_name: Mapping[str, str]
) -> str:
    """Return the type of a node's first output; an empty string if unknown.

    The type is the operator's own, else that of an attribute, else that of the first input that is
    not bool.
    """
    attribute_types = (
        _lower_case_type_name(attribute.t.data_type or attribute.i)
        for attribute in onnx_node.attribute
        if attribute.name in ("value", "to")
    )
    input_types = (
        type_by_name[name] for name in onnx_node.input if type_by_name.get(name, "bool") != "bool"
    )
    return (
        _OUTPUT_TYPES.get(onnx_node.op_type) or next(attribute_types, "") or next(input_types, "")
    )


def _lower_case_type_name(type_code: int) -> str:
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(type_code)).lower() if type_code else ""


@functools.cache
def _kernels_by_operator() -> dict[tuple[str, str], list[OperatorKernels]]:
    """Return the kernels by (domain, operator name)."""
    table: dict[tuple[str, str], list[OperatorKernels]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if not line.startswith("#"):
            domain, operator_name, versions, kernels = line.split(" ", 3)
            first_version, _, last_version = versions.rstrip("+").partition("-")
            types = [
                {
                    type_name
                    for constraint in kernel.split()
                    for type_name in constraint.partition("=")[2].split(",")
                }
                for kernel in kernels.split(" | ")
            ]
            table.setdefault((domain.strip("-"), operator_name), []).append(
                OperatorKernels(int(first_version), int(last_version or 0), types)
            )
    return table

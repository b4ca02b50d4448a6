"""The operators that have a kernel of ONNX Runtime's CUDA provider, and the kernels' types.

The table is cuda_kernels.txt; `tools/cuda_kernels.py` reads it from the wheel. Types are ONNX's
names in lower case; an empty string is an unknown type.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

# The output types of operators whose output type does not follow from their inputs.
_RESULTS = {
    **dict.fromkeys(
        ("And", "Equal", "Greater", "IsInf", "IsNaN", "Less", "Not", "Or", "Xor"), "bool"
    ),
    **dict.fromkeys(("ArgMax", "ArgMin", "NonZero", "Shape", "Size"), "int64"),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), "bool"),
}


def has_kernel(node: onnx.NodeProto, types: Mapping[str, str], opset: int) -> bool:
    """Return whether an onnx.NodeProto can run on CUDA.

    Args:
        node: the operator's node.
        types: the types of the graph's tensors, by tensor name.
        opset: the version of ONNX's operators that the model uses.
    """
    kinds = [types.get(name, "") for name in (*node.input, *node.output) if name]
    # int64 inputs after the first one are sizes and axes, which have constraints of their own.
    needed = {*kinds[:1], *(kind for kind in kinds if kind != "int64")} - {""}
    # ORT's own operators (com.microsoft) have version 1 only.
    version = 1 if node.domain else opset
    return any(
        first <= version <= (last or version)
        and any("any" in kernel or needed <= kernel for kernel in kernels)
        for first, last, kernels in _table().get((node.domain, node.op_type), ())
    )


def types_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the types of the tensors of an onnx.GraphProto, by tensor name."""
    types = {
        value.name: _name(value.type.tensor_type.elem_type)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    types.update({tensor.name: _name(tensor.data_type) for tensor in graph.initializer})
    for node in graph.node:
        # ORT omits tensors of unknown shape from value_info, so their types are inferred.
        for name in node.output[:1]:
            types[name] = types.get(name) or _inferred(node, types)
    return types


def _inferred(node: onnx.NodeProto, types: Mapping[str, str]) -> str:
    """Return the type of a node's first output; an empty string if unknown.

    The type is the operator's own, else that of an attribute, else that of the first input that is
    not bool.
    """
    stated = (
        _name(one.t.data_type or one.i) for one in node.attribute if one.name in ("value", "to")
    )
    given = (types[name] for name in node.input if types.get(name, "bool") != "bool")
    return _RESULTS.get(node.op_type) or next(stated, "") or next(given, "")


def _name(number: int) -> str:
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(number)).lower() if number else ""


@functools.cache
def _table() -> dict[tuple[str, str], list[tuple[int, int, list[set[str]]]]]:
    """Return the kernels by (domain, operator name).

    Each entry holds the operator's first version, its last version (0: still current), and one set
    of types for each kernel.
    """
    table: dict[tuple[str, str], list[Any]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if not line.startswith("#"):
            domain, name, versions, kernels = line.split(" ", 3)
            first, _, last = versions.rstrip("+").partition("-")
            types = [
                {
                    kind
                    for constraint in kernel.split()
                    for kind in constraint.partition("=")[2].split(",")
                }
                for kernel in kernels.split(" | ")
            ]
            table.setdefault((domain.strip("-"), name), []).append(
                (int(first), int(last or 0), types)
            )
    return table

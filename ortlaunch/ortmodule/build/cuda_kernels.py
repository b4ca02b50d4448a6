"""Which operators have a kernel of ONNX Runtime's CUDA provider, for which types, by the table cuda_kernels.txt.

`tools/cuda_kernels.py` reads the table from the wheel. Types are ONNX's names in lower case, "" where unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_RESULTS = {
    **dict.fromkeys(
        ("And", "Equal", "Greater", "IsInf", "IsNaN", "Less", "Not", "Or", "Xor"), "bool"
    ),
    **dict.fromkeys(("ArgMax", "ArgMin", "NonZero", "Shape", "Size"), "int64"),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual"), "bool"),
}


def has_kernel(node: onnx.NodeProto, types: Mapping[str, str], opset: int) -> bool:
    """Whether an onnx.NodeProto can run on CUDA; `types` are those of tensors, `opset` the model's.

    The first input's type, and every other one but int64, which are sizes and axes, must be one of a kernel's.
    """
    kinds = [types.get(name, "") for name in (*node.input, *node.output) if name]
    needed = {*kinds[:1], *(kind for kind in kinds if kind != "int64")} - {""}
    version = 1 if node.domain else opset
    return any(
        first <= version <= (last or version)
        and any("any" in kernel or needed <= kernel for kernel in kernels)
        for first, last, kernels in _table().get((node.domain, node.op_type), ())
    )


def types_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Types of the tensors of an onnx.GraphProto. ORT omits tensors of unknown shape; their types are inferred here."""
    types = {
        value.name: _name(value.type.tensor_type.elem_type)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    types.update({tensor.name: _name(tensor.data_type) for tensor in graph.initializer})
    for node in graph.node:
        for name in node.output[:1]:
            types[name] = types.get(name) or _inferred(node, types)
    return types


def _inferred(node: onnx.NodeProto, types: Mapping[str, str]) -> str:
    """Type of a node's first output: by its operator, by an attribute, or of the first input that is not bool."""
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
    """By domain and name: the first version of an operator, its last or 0, and the types of each kernel."""
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

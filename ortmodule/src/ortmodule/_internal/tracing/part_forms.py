"""ONNX forms that split a tensor into parts whose sizes follow from each batch's sizes.

The exporter's forms use the sizes of the first batch as constants.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.onnx import symbolic_helper

from ortmodule._internal.base.repair_registry import repair
from ortmodule._internal.base.source_guard import owning_class_or_module
from ortmodule._internal.tracing.symbolics import write_int64_constant


def chunk(g: Any, x: Any, chunks: Any, dim: Any) -> Any:
    """Write chunk, which may return fewer parts than requested: 3 for a size of 5 in 4 parts.

    Torch's form is a sequence, whose shapes ORT cannot infer.
    """
    count, axis = (symbolic_helper._get_const(value, "i", "chunk") for value in (chunks, dim))
    # The node that unpacks the list has one output for each traced part.
    part_count = next(use.user for use in g.original_node.output().uses()).outputsSize()
    return g.op("prim::ListConstruct", *constant_chunk(g, x, count, axis, part_count))


def constant_chunk(g: Any, x: Any, chunks: int, dim: int, part_count: int = 0) -> list[Any]:
    """Write a split into parts whose size is computed from the dimension's size.

    Args:
        g: the graph.
        x: the tensor.
        chunks: the requested number of parts.
        dim: the dimension to split.
        part_count: the actual number of parts, if it is not `chunks`.
    """
    # Division that rounds up, as in torch's chunk.
    part_size = g.op(
        "Div",
        g.op("Add", _write_size_of_dimension(g, x, dim), write_int64_constant(g, [chunks - 1])),
        write_int64_constant(g, [chunks]),
    )
    return _write_split_into_traced_part_count(g, x, part_size, dim, part_count or chunks)


def split(g: Any, x: Any, sizes: Any, dim: Any, _outputs: Any = None) -> Any:
    """Write a split into parts of one size.

    If the dimension's size is unknown, torch's form assumes that the last part is as large as the
    others.
    """
    part_size, axis = (symbolic_helper._maybe_get_const(value, "i") for value in (sizes, dim))
    part_count = symbolic_helper._maybe_get_const(_outputs, "i")
    is_size_unknown = symbolic_helper._get_tensor_dim_size(x, axis) is None
    if is_size_unknown and isinstance(part_size, int) and isinstance(part_count, int):
        return _write_split_into_traced_part_count(
            g, x, write_int64_constant(g, [part_size]), axis, part_count
        )
    return importlib.import_module("torch.onnx.symbolic_opset13").split(g, x, sizes, dim, _outputs)


@repair(
    "export_chunks_with_sizes",
    "after import",
    100,
    fault="The parts of `h.chunk(2, -1)` have the first batch's sizes as constants: `q / "
    "q.shape[0]` of another batch is 70.96 instead of 67.54.",
    example="tracing/test_compat.py::test_each_check_passes[parts]",
)
def export_chunks_with_sizes() -> None:
    """Replace ORT's export of `chunk` (every torch)."""
    owning_class_or_module("_custom_op_symbolic_registry:CustomOpSymbolicRegistry").register(
        "ConstantChunk", "prim", constant_chunk
    )


def _write_size_of_dimension(g: Any, x: Any, dim: int) -> Any:
    return g.op("Gather", g.op("Shape", x), write_int64_constant(g, [dim]))


def _write_split_into_traced_part_count(
    g: Any, x: Any, part_size: Any, dim: int, part_count: int
) -> list[Any]:
    """Write a Split into as many parts as were traced; it fails in a pass with more or fewer parts.

    Args:
        g: the graph.
        x: the tensor.
        part_size: the size of all parts but the last, which may be smaller.
        dim: the dimension to split.
        part_count: the number of parts.
    """
    remaining_size = g.op(
        "Sub",
        _write_size_of_dimension(g, x, dim),
        g.op("Mul", part_size, write_int64_constant(g, [part_count - 1])),
    )
    last_size = g.op("Min", part_size, remaining_size)
    # In a pass with fewer parts `remaining_size` is below 1. A last part of full size then exceeds the
    # dimension, so that Split fails.
    if part_count > 1:
        last_size = g.op(
            "Where",
            g.op("Less", remaining_size, write_int64_constant(g, [1])),
            part_size,
            last_size,
        )
    split = g.op(
        "Split",
        x,
        g.op("Concat", *[part_size] * (part_count - 1), last_size, axis_i=0),
        axis_i=dim,
        outputs=part_count,
    )
    parts: list[Any] = list(split) if part_count > 1 else [split]
    # Unknown sizes: the exporter would use the traced ones as constants.
    for part in parts:
        part.setType(x.type().with_sizes([None] * x.type().dim()))
    return parts

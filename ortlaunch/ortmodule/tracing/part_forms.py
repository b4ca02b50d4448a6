"""ONNX forms that split a tensor into parts whose sizes follow from each batch's sizes.

The exporter's forms use the sizes of the first batch as constants.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.onnx import symbolic_helper

from ortlaunch.ortmodule.tracing.symbolics import integers


def chunk(g: Any, x: Any, chunks: Any, dim: Any) -> Any:
    """Write chunk, which may return fewer parts than requested: 3 for a size of 5 in 4 parts.

    Torch's form is a sequence, whose shapes ORT cannot infer.
    """
    count, axis = (symbolic_helper._get_const(value, "i", "chunk") for value in (chunks, dim))
    # The node that unpacks the list has one output for each traced part.
    number = next(use.user for use in g.original_node.output().uses()).outputsSize()
    return g.op("prim::ListConstruct", *constant_chunk(g, x, count, axis, number))


def constant_chunk(g: Any, x: Any, chunks: int, dim: int, number: int = 0) -> list[Any]:
    """Write a split into parts whose size is computed from the dimension's size.

    Args:
        g: the graph.
        x: the tensor.
        chunks: the requested number of parts.
        dim: the dimension to split.
        number: the actual number of parts, if it is not `chunks`.
    """
    # Division that rounds up, as in torch's chunk.
    each = g.op(
        "Div", g.op("Add", _size(g, x, dim), integers(g, [chunks - 1])), integers(g, [chunks])
    )
    return _parts(g, x, each, dim, number or chunks)


def split(g: Any, x: Any, sizes: Any, dim: Any, _outputs: Any = None) -> Any:
    """Write a split into parts of one size.

    If the dimension's size is unknown, torch's form assumes that the last part is as large as the
    others.
    """
    size, axis = (symbolic_helper._maybe_get_const(value, "i") for value in (sizes, dim))
    number = symbolic_helper._maybe_get_const(_outputs, "i")
    unknown = symbolic_helper._get_tensor_dim_size(x, axis) is None
    if unknown and isinstance(size, int) and isinstance(number, int):
        return _parts(g, x, integers(g, [size]), axis, number)
    return importlib.import_module("torch.onnx.symbolic_opset13").split(g, x, sizes, dim, _outputs)


def _size(g: Any, x: Any, dim: int) -> Any:
    return g.op("Gather", g.op("Shape", x), integers(g, [dim]))


def _parts(g: Any, x: Any, each: Any, dim: int, number: int) -> list[Any]:
    """Write a Split into as many parts as were traced; it fails in a pass with more or fewer parts.

    Args:
        g: the graph.
        x: the tensor.
        each: the size of all parts but the last, which may be smaller.
        dim: the dimension to split.
        number: the number of parts.
    """
    rest = g.op("Sub", _size(g, x, dim), g.op("Mul", each, integers(g, [number - 1])))
    last = g.op("Min", each, rest)
    # In a pass with fewer parts `rest` is below 1. A last part of full size then exceeds the
    # dimension, so that Split fails.
    if number > 1:
        last = g.op("Where", g.op("Less", rest, integers(g, [1])), each, last)
    split = g.op(
        "Split",
        x,
        g.op("Concat", *[each] * (number - 1), last, axis_i=0),
        axis_i=dim,
        outputs=number,
    )
    made: list[Any] = list(split) if number > 1 else [split]
    # Unknown sizes: the exporter would use the traced ones as constants.
    for part in made:
        part.setType(x.type().with_sizes([None] * x.type().dim()))
    return made

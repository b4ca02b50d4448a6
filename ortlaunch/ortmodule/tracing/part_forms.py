"""ONNX forms for parts of a tensor, whose sizes follow from each batch's: the exporter's keep those of the first."""

from __future__ import annotations

import importlib
from typing import Any

from ortlaunch.ortmodule.tracing.symbolics import integers


def chunk(g: Any, x: Any, chunks: Any, dim: Any) -> Any:
    """Fewer parts than requested, such as 3 of a size of 5 in 4: torch's form is a sequence, which ORT cannot infer."""
    from torch.onnx import symbolic_helper

    count, axis = (symbolic_helper._get_const(value, "i", "chunk") for value in (chunks, dim))
    number = next(use.user for use in g.original_node.output().uses()).outputsSize()
    return g.op("prim::ListConstruct", *constant_chunk(g, x, count, axis, number))


def constant_chunk(g: Any, x: Any, chunks: int, dim: int, number: int = 0) -> list[Any]:
    """Parts of a size that follows from the dimension's.

    number: of parts, where it is not `chunks`.
    """
    each = g.op(
        "Div", g.op("Add", _size(g, x, dim), integers(g, [chunks - 1])), integers(g, [chunks])
    )
    return _parts(g, x, each, dim, number or chunks)


def split(g: Any, x: Any, sizes: Any, dim: Any, _outputs: Any = None) -> Any:
    """Parts of one size: where a dimension's size is unknown, torch's form takes the last one for a whole one."""
    from torch.onnx import symbolic_helper

    size, axis = (symbolic_helper._maybe_get_const(value, "i") for value in (sizes, dim))
    number = symbolic_helper._maybe_get_const(_outputs, "i")
    unknown = symbolic_helper._get_tensor_dim_size(x, axis) is None
    if unknown and isinstance(size, int) and isinstance(number, int):
        return _parts(g, x, integers(g, [size]), axis, number)
    return importlib.import_module("torch.onnx.symbolic_opset13").split(g, x, sizes, dim, _outputs)


def _size(g: Any, x: Any, dim: int) -> Any:
    return g.op("Gather", g.op("Shape", x), integers(g, [dim]))


def _parts(g: Any, x: Any, each: Any, dim: int, number: int) -> list[Any]:
    """A Split into as many parts as were traced, which fails in a pass where there are more or fewer.

    Their sizes are unknown to the exporter, which would take the traced ones for constants.

    each: the size of all parts but the last, which may be smaller.
    """
    rest = g.op("Sub", _size(g, x, dim), g.op("Mul", each, integers(g, [number - 1])))
    last = g.op("Min", each, rest)
    if (
        number > 1
    ):  # fewer parts: a whole last one is too much for the dimension, so that Split fails
        last = g.op("Where", g.op("Less", rest, integers(g, [1])), each, last)
    split = g.op(
        "Split",
        x,
        g.op("Concat", *[each] * (number - 1), last, axis_i=0),
        axis_i=dim,
        outputs=number,
    )
    made: list[Any] = list(split) if number > 1 else [split]
    for part in made:
        part.setType(x.type().with_sizes([None] * x.type().dim()))
    return made

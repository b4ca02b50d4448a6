"""ONNX forms for parts of a tensor, whose sizes follow from each batch's: the exporter's keep those of the first."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from ortlaunch.ortmodule.tracing.symbolics import integers


def chunk(g: Any, x: Any, chunks: Any, dim: Any) -> Any:
    """Fewer parts than requested, such as 3 of a size of 5 in 4: torch's form is a sequence, which ORT cannot infer."""
    from torch.onnx import symbolic_helper

    count, axis = (symbolic_helper._get_const(value, "i", "chunk") for value in (chunks, dim))
    return g.op("prim::ListConstruct", *constant_chunk(g, x, count, axis, _uses(g)))


def constant_chunk(g: Any, x: Any, chunks: int, dim: int, number: int = 0) -> list[Any]:
    """Parts of a size that follows from the dimension's.

    number: of parts, where it is not `chunks`.
    """
    each = g.op("Div", g.op("Add", _size(g, x, dim), integers(g, [chunks - 1])), integers(g, [chunks]))
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


def tensor_split(g: Any, x: Any, at: Any, dim: Any) -> Any:
    """In so many parts, the first ones greater by 1 where it does not come out even, or cut before given places."""
    from torch.onnx import symbolic_helper

    axis = symbolic_helper._get_const(dim, "i", "dim")
    known = symbolic_helper._maybe_get_const(at, "t")
    places = known.tolist() if isinstance(known, torch.Tensor) else symbolic_helper._get_const(at, "is", "indices")
    if isinstance(places, int):
        sizes = g.op("Add", _size(g, x, axis), integers(g, [*reversed(range(places))]))
        parts = _split(g, x, g.op("Div", sizes, integers(g, [places])), axis, places)
    else:
        bounds = zip([0, *places], [*places, sys.maxsize])
        parts = [symbolic_helper._slice_helper(g, x, axes=[axis], starts=[one], ends=[end]) for one, end in bounds]
    return g.op("prim::ListConstruct", *parts)


def _uses(g: Any) -> int:
    """How many parts the traced graph unpacks."""
    return int(next(use.user for use in g.original_node.output().uses()).outputsSize())


def _size(g: Any, x: Any, dim: int) -> Any:
    return g.op("Gather", g.op("Shape", x), integers(g, [dim]))


def _parts(g: Any, x: Any, each: Any, dim: int, number: int) -> list[Any]:
    """A Split into as many parts as were traced, which fails in a pass where there are more or fewer.

    Their sizes are unknown to the exporter, which would take the traced ones for constants.

    each: the size of all parts but the last, which may be smaller.
    """
    rest = g.op("Sub", _size(g, x, dim), g.op("Mul", each, integers(g, [number - 1])))
    last = g.op("Min", each, rest)
    if number > 1:  # fewer parts: a whole last one is too much for the dimension, so that Split fails
        last = g.op("Where", g.op("Less", rest, integers(g, [1])), each, last)
    return _split(g, x, g.op("Concat", *[each] * (number - 1), last, axis_i=0), dim, number)


def _split(g: Any, x: Any, sizes: Any, dim: int, number: int) -> list[Any]:
    made = g.op("Split", x, sizes, axis_i=dim, outputs=number)
    parts: list[Any] = list(made) if number > 1 else [made]
    for part in parts:
        part.setType(x.type().with_sizes([None] * x.type().dim()))
    return parts

"""ONNX forms (symbolics) of index, index_put, diff, cumsum and floor_divide.

Torch's exporter has no form for these operators, or a wrong one. Each function adds ONNX nodes to
the graph `g` and returns the value that replaces the operator's output.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from ortlaunch.ortmodule.tracing.symbolics import GraphWriter, integers, is_bool, type_of

# torch indexes with uint8 tensors as with masks.
_MASKS = (torch.bool, torch.uint8)


def index(g: Any, x: Any, indices: Any) -> Any:
    """Write an index by several tensors; negative indices and masks of any rank are allowed.

    With several tensors torch's form does not wrap negative indices, and accepts only masks of one
    dimension.
    """
    given = _without_masks(g, symbolic_helper._unpack_list(indices))
    tensors = [dim for dim, one in enumerate(given) if not symbolic_helper._is_none(one)]
    for dim in tensors if len(tensors) > 1 else ():
        place = g.op("Cast", given[dim], to_i=torch.onnx.TensorProtoDataType.INT64.value)
        # The sizes are read at run time, because they may differ between batches.
        from_end = g.op("Add", place, g.op("Gather", g.op("Shape", x), integers(g, dim)))
        given[dim] = g.op("Where", g.op("Less", place, integers(g, 0)), from_end, place)
        indices = g.op("prim::ListConstruct", *given)
    return importlib.import_module("torch.onnx.symbolic_opset11").index(g, x, indices)


def _without_masks(g: Any, indices: list[Any]) -> list[Any]:
    """Replace each mask by the indices of its true values: one index tensor for each dimension."""
    given: list[Any] = []
    for one in indices:
        if symbolic_helper._is_none(one) or type_of(one) not in _MASKS:
            given.append(one)
        else:
            places = g.op("NonZero", one)
            given += [g.op("Gather", places, integers(g, dim)) for dim in range(one.type().dim())]
    return given


def index_put(g: Any, into: Any, indices: Any, values: Any, accumulate: Any = None) -> Any:
    """Write index_put with broadcast of the values and sums at repeated indices.

    Torch's form requires values of the replaced elements' shape. With `accumulate` it keeps only
    one of several values for the same element.
    """
    put = importlib.import_module("torch.onnx.symbolic_opset11").index_put
    given: list[Any] = symbolic_helper._unpack_list(indices)
    adds = accumulate is not None and symbolic_helper._maybe_get_const(accumulate, "b")
    masked = any(is_bool(one) for one in given)
    # For a single mask and a scalar, torch's form is a masked fill, of a mask with all dimensions.
    if masked and len(given) == 1 and not adds and symbolic_helper._get_tensor_rank(values) == 0:
        missing = range(given[0].type().dim(), into.type().dim())
        if missing:
            mask = symbolic_helper._unsqueeze_helper(g, given[0], [*missing])
            mask.setType(given[0].type().with_sizes([None] * into.type().dim()))
            indices = g.op("prim::ListConstruct", mask)
        return put(g, into, indices, values, accumulate)
    own: dict[str, Callable[..., Any]] = {}
    if masked:
        indices = g.op("prim::ListConstruct", *_without_masks(g, given))
    if _are_broadcast(g, masked):
        # Torch's form reshapes the values; Expand also repeats them.
        own["Reshape"] = lambda value, shape, **_: g.op("Expand", value, shape)
    if adds:
        _require_sums(g)
        own["ScatterND"] = functools.partial(g.op, "ScatterND", reduction_s="add")
    return put(GraphWriter(g, own), into, indices, values, accumulate)


def _are_broadcast(g: Any, masked: bool) -> bool:
    """Return whether the values of an index_put in the traced graph may have to be repeated."""
    into, indices, values = [*g.original_node.inputs()][:3]
    places = [place.type().dim() for place in indices.node().inputs()]
    sizes = values.type().sizes()
    if sizes is None or into.type().dim() is None or None in places:
        # Types are missing in a node that the exporter itself made, for `x[..., 0] = y`. Its values
        # have been reshaped, so that none is repeated.
        return False
    # Values may be repeated if they have fewer dimensions than `into[indices]`, or one of size 1.
    return masked or len(sizes) != max(places) + into.type().dim() - len(places) or 1 in sizes


def _require_sums(g: Any) -> None:
    """Refuse an opset before 16, whose Scatter operators cannot add.

    There torch's forms keep only one of several values for the same element.
    """
    if g.opset < 16:
        raise RuntimeError(
            f"sums at indices need Settings.opset 16 or newer; this export uses opset {g.opset}"
        )


def diff(g: Any, x: Any, times: Any, dim: Any, before: Any, after: Any) -> Any:
    """Write diff, for which torch's exporter has no form."""
    axis = symbolic_helper._get_const(dim, "i", "dim")
    order = symbolic_helper._get_const(times, "i", "n")
    # torch's diff with n=0 returns `x` alone, and ignores `prepend` and `append`.
    if order == 0:
        return x
    parts = [part for part in (before, x, after) if not symbolic_helper._is_none(part)]
    x = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    # torch's difference of two booleans is their exclusive or.
    minus = "Xor" if is_bool(x) else "Sub"
    for _ in range(order):
        later = symbolic_helper._slice_helper(g, x, axes=[axis], starts=[1], ends=[sys.maxsize])
        x = g.op(
            minus, later, symbolic_helper._slice_helper(g, x, axes=[axis], starts=[0], ends=[-1])
        )
    return x


def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Write cumsum; a boolean tensor is cast to integers first."""
    if is_bool(x):
        x = g.op("Cast", x, to_i=torch.onnx.TensorProtoDataType.INT64.value)
    return importlib.import_module("torch.onnx.symbolic_opset11").cumsum(g, x, dim, dtype)


def floor_divide(g: Any, x: Any, y: Any) -> Any:
    """Write integer division that rounds down, as torch's does since 1.13.

    ONNX's Div and the exporter's form round towards zero.
    """
    # Sizes are not negative, so the exporter's form is right for them, and ORT infers shapes from
    # it.
    if _is_size(x) and _is_size(y):
        return importlib.import_module("torch.onnx.symbolic_opset9").floor_divide(g, x, y)
    # ONNX's Mod has the sign of the divisor, so the difference is a multiple of the divisor.
    return g.op("Div", g.op("Sub", x, g.op("Mod", x, y)), y)


def _is_size(value: Any) -> bool:
    """Return whether a value is computed from sizes and non-negative constants only."""
    node = value.node()
    kind = node.kind().removeprefix("onnx::")
    if kind == "Constant":
        return bool((node.t("value") >= 0).all())
    if kind in ("Gather", "Cast", "Add", "Mul", "Div", "Squeeze", "Unsqueeze"):
        return all(map(_is_size, list(node.inputs())[: 1 if kind == "Gather" else None]))
    return kind == "Shape"

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

from ortmodule._internal.tracing.symbolics import (
    GraphWriter,
    dtype_of_graph_value,
    is_boolean_graph_value,
    write_int64_constant,
)

# torch indexes with uint8 tensors as with masks.
_MASKS = (torch.bool, torch.uint8)


def index(g: Any, x: Any, indices: Any) -> Any:
    """Write an index by several tensors; negative indices and masks of any rank are allowed.

    With several tensors torch's form does not wrap negative indices, and accepts only masks of one
    dimension.
    """
    unmasked_indices = _masks_to_index_tensors(g, symbolic_helper._unpack_list(indices))
    tensor_dims = [
        dim
        for dim, index_tensor in enumerate(unmasked_indices)
        if not symbolic_helper._is_none(index_tensor)
    ]
    if len(tensor_dims) > 1:
        for dim in tensor_dims:
            integer_index = g.op(
                "Cast", unmasked_indices[dim], to_i=torch.onnx.TensorProtoDataType.INT64.value
            )
            # The sizes are read at run time, because they may differ between batches.
            from_end = g.op(
                "Add", integer_index, g.op("Gather", g.op("Shape", x), write_int64_constant(g, dim))
            )
            unmasked_indices[dim] = g.op(
                "Where",
                g.op("Less", integer_index, write_int64_constant(g, 0)),
                from_end,
                integer_index,
            )
            indices = g.op("prim::ListConstruct", *unmasked_indices)
    return importlib.import_module("torch.onnx.symbolic_opset11").index(g, x, indices)


def _masks_to_index_tensors(g: Any, mask_and_index_values: list[Any]) -> list[Any]:
    """Replace each mask by the indices of its true values: one index tensor for each dimension."""
    index_tensors: list[Any] = []
    for index_tensor in mask_and_index_values:
        if (
            symbolic_helper._is_none(index_tensor)
            or dtype_of_graph_value(index_tensor) not in _MASKS
        ):
            index_tensors.append(index_tensor)
        else:
            true_positions = g.op("NonZero", index_tensor)
            index_tensors += [
                g.op("Gather", true_positions, write_int64_constant(g, dim))
                for dim in range(index_tensor.type().dim())
            ]
    return index_tensors


def index_put(g: Any, into: Any, indices: Any, values: Any, accumulate: Any = None) -> Any:
    """Write index_put with broadcast of the values and sums at repeated indices.

    Torch's form requires values of the replaced elements' shape. With `accumulate` it keeps only
    one of several values for the same element.
    """
    torch_form = importlib.import_module("torch.onnx.symbolic_opset11").index_put
    index_tensors: list[Any] = symbolic_helper._unpack_list(indices)
    accumulates = accumulate is not None and symbolic_helper._maybe_get_const(accumulate, "b")
    has_mask = any(is_boolean_graph_value(index_tensor) for index_tensor in index_tensors)
    # For a single mask and a scalar, torch's form is a masked fill, of a mask with all dimensions.
    if (
        has_mask
        and len(index_tensors) == 1
        and not accumulates
        and symbolic_helper._get_tensor_rank(values) == 0
    ):
        missing_dims = range(index_tensors[0].type().dim(), into.type().dim())
        if missing_dims:
            mask = symbolic_helper._unsqueeze_helper(g, index_tensors[0], [*missing_dims])
            mask.setType(index_tensors[0].type().with_sizes([None] * into.type().dim()))
            indices = g.op("prim::ListConstruct", mask)
        return torch_form(g, into, indices, values, accumulate)
    replaced_operators: dict[str, Callable[..., Any]] = {}
    if has_mask:
        indices = g.op("prim::ListConstruct", *_masks_to_index_tensors(g, index_tensors))
    if _index_put_may_repeat_values(g, has_mask):
        # Torch's form reshapes the values; Expand also repeats them.
        replaced_operators["Reshape"] = lambda value, shape, **_: g.op("Expand", value, shape)
    if accumulates:
        _require_opset_with_summing_scatter(g)
        replaced_operators["ScatterND"] = functools.partial(g.op, "ScatterND", reduction_s="add")
    return torch_form(GraphWriter(g, replaced_operators), into, indices, values, accumulate)


def _index_put_may_repeat_values(g: Any, has_mask: bool) -> bool:
    """Return whether the values of an index_put in the traced graph may have to be repeated."""
    into, indices, values = [*g.original_node.inputs()][:3]
    index_ranks = [index_tensor.type().dim() for index_tensor in indices.node().inputs()]
    sizes = values.type().sizes()
    if sizes is None or into.type().dim() is None or None in index_ranks:
        # Types are missing in a node that the exporter itself made, for `x[..., 0] = y`. Its values
        # have been reshaped, so that none is repeated.
        return False
    # Values may be repeated if they have fewer dimensions than `into[indices]`, or one of size 1.
    return (
        has_mask
        or len(sizes) != max(index_ranks) + into.type().dim() - len(index_ranks)
        or 1 in sizes
    )


def _require_opset_with_summing_scatter(g: Any) -> None:
    """Refuse an opset before 16, whose Scatter operators cannot add.

    There torch's forms keep only one of several values for the same element.
    """
    if g.opset < 16:
        raise RuntimeError(
            f"sums at indices need setting opset 16 or newer; this export uses opset {g.opset}"
        )


def diff(g: Any, x: Any, difference_count: Any, dim: Any, prepended: Any, appended: Any) -> Any:
    """Write diff, for which torch's exporter has no form."""
    axis = symbolic_helper._get_const(dim, "i", "dim")
    order = symbolic_helper._get_const(difference_count, "i", "n")
    # torch's diff with n=0 returns `x` alone, and ignores `prepend` and `append`.
    if order == 0:
        return x
    parts = [part for part in (prepended, x, appended) if not symbolic_helper._is_none(part)]
    x = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    # torch's difference of two booleans is their exclusive or.
    operator_type = "Xor" if is_boolean_graph_value(x) else "Sub"
    for _ in range(order):
        later = symbolic_helper._slice_helper(g, x, axes=[axis], starts=[1], ends=[sys.maxsize])
        x = g.op(
            operator_type,
            later,
            symbolic_helper._slice_helper(g, x, axes=[axis], starts=[0], ends=[-1]),
        )
    return x


def cumsum(g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    """Write cumsum; a boolean tensor is cast to integers first."""
    if is_boolean_graph_value(x):
        x = g.op("Cast", x, to_i=torch.onnx.TensorProtoDataType.INT64.value)
    return importlib.import_module("torch.onnx.symbolic_opset11").cumsum(g, x, dim, dtype)


def floor_divide(g: Any, dividend: Any, divisor: Any) -> Any:
    """Write integer division that rounds down, as torch's does since 1.13.

    ONNX's Div and the exporter's form round towards zero.
    """
    # Sizes are not negative, so the exporter's form is right for them, and ORT infers shapes from
    # it.
    if _is_computed_from_sizes_only(dividend) and _is_computed_from_sizes_only(divisor):
        return importlib.import_module("torch.onnx.symbolic_opset9").floor_divide(
            g, dividend, divisor
        )
    # ONNX's Mod has the sign of the divisor, so the difference is a multiple of the divisor.
    return g.op("Div", g.op("Sub", dividend, g.op("Mod", dividend, divisor)), divisor)


def _is_computed_from_sizes_only(graph_value: Any) -> bool:
    """Return whether a value is computed from sizes and non-negative constants only."""
    node = graph_value.node()
    operator_type = node.kind().removeprefix("onnx::")
    if operator_type == "Constant":
        return bool((node.t("value") >= 0).all())
    if operator_type in ("Gather", "Cast", "Add", "Mul", "Div", "Squeeze", "Unsqueeze"):
        return all(
            map(
                _is_computed_from_sizes_only,
                list(node.inputs())[: 1 if operator_type == "Gather" else None],
            )
        )
    return operator_type == "Shape"

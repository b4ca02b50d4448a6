"""Sizes in a trace that do not depend on the number of rows, the first size of a model's inputs.

Python code of decoders compares lengths (`kv_length == q_length`). A graph that depends on lengths
only is valid for a batch of any number of rows.
"""

from __future__ import annotations

import torch

# Operators on numbers: the result depends on what their inputs depend on.
_NUMBER_OPERATORS = {
    f"aten::{name}"
    for name in (
        *("Int", "ScalarImplicit", "add", "sub", "mul", "floor_divide", "remainder", "neg"),
        *("gt", "lt", "ge", "le", "eq", "ne"),
    )
} | {"prim::NumToTensor"}
# Operators on tensors whose result has the dimensions of the inputs, after broadcasting.
_ELEMENTWISE_OPERATORS = {
    f"aten::{name}" for name in ("to", "add", "mul", "contiguous", "dropout", "layer_norm", "clone")
}


def is_independent_of_row_count(number: torch.Tensor) -> bool:
    """Return whether a number in a trace depends on later sizes of the inputs only, or on none.

    Args:
        number: a size, or what is computed from sizes.
    """
    traced_value: torch._C.Value = torch._C._get_value_trace(number)  # type: ignore[attr-defined]
    return _is_number_independent(traced_value)


def _is_number_independent(number: torch._C.Value) -> bool:
    node = number.node()
    inputs = list(node.inputs())
    if node.kind() == "aten::size" and len(inputs) == 2:
        dim = inputs[1].node()
        rank = _rank_or_none(inputs[0])
        return (
            rank is not None
            and dim.kind() == "prim::Constant"
            and _is_dim_independent(inputs[0], dim.i("value") % rank)
        )
    return node.kind() == "prim::Constant" or (
        node.kind() in _NUMBER_OPERATORS and all(map(_is_number_independent, inputs))
    )


def _is_dim_independent(tensor: torch._C.Value, dim: int) -> bool:
    """Return whether the size of one dimension is independent; unknown operators are not."""
    node = tensor.node()
    inputs = list(node.inputs())
    rank = _rank_or_none(tensor)
    if node.kind() == "prim::Param":
        return dim > 0
    if rank is None:
        return False
    if node.kind() == "aten::embedding":
        return dim == rank - 1 or _is_dim_independent(inputs[1], dim)
    if node.kind() in ("aten::view", "aten::reshape"):
        sizes = list(inputs[1].node().inputs())
        # -1 is computed from all sizes.
        return (
            len(sizes) == rank
            and not (
                sizes[dim].node().kind() == "prim::Constant" and sizes[dim].node().i("value") == -1
            )
            and _is_number_independent(sizes[dim])
        )
    if node.kind() not in _ELEMENTWISE_OPERATORS:
        return False
    missing_dims = [
        (value, rank - input_rank)
        for value in inputs
        if (input_rank := _rank_or_none(value)) is not None
    ]
    return all(
        dim < missing_count or _is_dim_independent(value, dim - missing_count)
        for value, missing_count in missing_dims
    )


def _rank_or_none(value: torch._C.Value) -> int | None:
    value_type = value.type()
    return value_type.dim() if isinstance(value_type, torch._C.TensorType) else None

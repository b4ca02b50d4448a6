"""Tensors that have a size that follows from values, such as `h[mask]`, while a model is traced.

These are the sizes that the model's code may read in Python, where the graph would keep those of
the first batch. torch_in_graph/value_sizes.py finds them in the traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ortmodule._internal.base.torch_calls import (
    pause_tracing_and_torch_function,
    tensor_property_getter,
)
from ortmodule._internal.tracing.grad_mode import tensors_inside_nested_values

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Args

_T = torch.Tensor
_MASKS = (torch.bool, torch.uint8)
# The first dimension of their results follows from values.
_SELECTING = {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}
_SHAPES = {_T.size, tensor_property_getter("shape")}
_COUNTS = {_T.numel, _T.nelement, torch.numel}


class ValueDependentDims:
    """The dimensions of tensors that have such a size, as far as they are known."""

    def __init__(self) -> None:
        self._dims_by_tensor = WeakTensorKeyDictionary()

    def record_value_dependent_dims_of_results(
        self,
        called_function: AnyFunction,
        call_arguments: Args,
        input_tensors: Sequence[torch.Tensor],
        call_result: object,
    ) -> None:
        """Record the dimensions of a call's results; `input_tensors` are the tensors among its arguments."""
        selected_dim = self._dim_selected_by_values_or_none(called_function, call_arguments)
        dims_before = [
            (input_tensor, self._dims_by_tensor[input_tensor])
            for input_tensor in input_tensors
            if input_tensor in self._dims_by_tensor
        ]
        if selected_dim is None and not dims_before:
            return
        with pause_tracing_and_torch_function():
            for result_tensor in tensors_inside_nested_values(call_result):
                # A dimension stays the same one if it has the same place and size.
                dims = {
                    dim
                    for input_tensor, known_dims in dims_before
                    for dim in known_dims
                    if result_tensor.dim() == input_tensor.dim()
                    and result_tensor.shape[dim] == input_tensor.shape[dim]
                } | ({selected_dim} if selected_dim is not None else set())
                if dims and result_tensor.dim():
                    self._dims_by_tensor[result_tensor] = dims

    def value_dependent_sizes_read_by_call(
        self, called_function: AnyFunction, call_arguments: Args, call_result: Any
    ) -> list[object]:
        """Return the sizes among a call's results, of those that read sizes, that follow from values."""
        dims = (
            self._dims_by_tensor.get(call_arguments[0])
            if call_arguments and isinstance(call_arguments[0], _T)
            else None
        )
        if not dims:
            return []
        if called_function in _COUNTS:
            return [call_result]
        if called_function is _T.__len__:
            return [call_result] if 0 in dims else []
        if called_function not in _SHAPES:
            return []
        if len(call_arguments) > 1:
            return [call_result] if call_arguments[1] % len(call_arguments[0].shape) in dims else []
        return [call_result[dim] for dim in dims]

    def _dim_selected_by_values_or_none(
        self, called_function: AnyFunction, call_arguments: Args
    ) -> int | None:
        """Return the dimension that an index or a function such as `nonzero` selects, or None."""
        name = getattr(called_function, "__name__", "")
        if name in _SELECTING or (name == "where" and len(call_arguments) == 1):
            return 0
        if called_function is not _T.__getitem__:
            return None
        dim = 0
        for part in (
            call_arguments[1] if isinstance(call_arguments[1], tuple) else call_arguments[1:]
        ):
            if isinstance(part, _T) and (part.dtype in _MASKS or part in self._dims_by_tensor):
                return dim
            dim += part is None or isinstance(part, slice)
        return None

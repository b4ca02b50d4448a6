"""Tensors that have a size that follows from values, such as `h[mask]`, while a model is traced.

These are the sizes that the model's code may read in Python, where the graph would keep those of
the first batch. torch_in_graph/value_sizes.py finds them in the traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base.torch_calls import pause_tracing, tensor_getter
from ortlaunch.ortmodule.tracing.grad_mode import nested_tensors

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args

_T = torch.Tensor
_MASKS = (torch.bool, torch.uint8)
# The first dimension of their results follows from values.
_SELECTING = {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}
_SHAPES = {_T.size, tensor_getter("shape")}
_COUNTS = {_T.numel, _T.nelement, torch.numel}


class Selections:
    """The dimensions of tensors that have such a size, as far as they are known."""

    def __init__(self) -> None:
        self._dims_by_tensor = WeakTensorKeyDictionary()

    def record_call(
        self,
        function: AnyFunction,
        args: Args,
        input_tensors: Sequence[torch.Tensor],
        result: object,
    ) -> None:
        """Record the dimensions of a call's results; `input_tensors` are the tensors among its arguments."""
        selected_dim = self._selected_dim(function, args)
        dims_before = [
            (input_tensor, self._dims_by_tensor[input_tensor])
            for input_tensor in input_tensors
            if input_tensor in self._dims_by_tensor
        ]
        if selected_dim is None and not dims_before:
            return
        with pause_tracing():
            for result_tensor in nested_tensors(result):
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

    def value_dependent_sizes(self, function: AnyFunction, args: Args, result: Any) -> list[object]:
        """Return the sizes among a call's results, of those that read sizes, that follow from values."""
        dims = self._dims_by_tensor.get(args[0]) if args and isinstance(args[0], _T) else None
        if not dims:
            return []
        if function in _COUNTS:
            return [result]
        if function is _T.__len__:
            return [result] if 0 in dims else []
        if function not in _SHAPES:
            return []
        if len(args) > 1:
            return [result] if args[1] % len(args[0].shape) in dims else []
        return [result[dim] for dim in dims]

    def _selected_dim(self, function: AnyFunction, args: Args) -> int | None:
        """Return the dimension that an index or a function such as `nonzero` selects, or None."""
        name = getattr(function, "__name__", "")
        if name in _SELECTING or (name == "where" and len(args) == 1):
            return 0
        if function is not _T.__getitem__:
            return None
        dim = 0
        for part in args[1] if isinstance(args[1], tuple) else args[1:]:
            if isinstance(part, _T) and (part.dtype in _MASKS or part in self._dims_by_tensor):
                return dim
            dim += part is None or isinstance(part, slice)
        return None

"""Tensors that have a size that follows from values, such as `h[mask]`, while a model is traced.

These are the sizes that the model's code may read in Python, where the graph would keep those of
the first batch. torch_in_graph/value_sizes.py finds them in the traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base.torch_calls import getter, untraced
from ortlaunch.ortmodule.tracing.grad_mode import tensors

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args

_T = torch.Tensor
_MASKS = (torch.bool, torch.uint8)
# The first dimension of their results follows from values.
_SELECTING = {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}
_SHAPES = {_T.size, getter("shape")}
_COUNTS = {_T.numel, _T.nelement, torch.numel}


class Selections:
    """The dimensions of tensors that have such a size, as far as they are known."""

    def __init__(self) -> None:
        self._dims = WeakTensorKeyDictionary()

    def follow(
        self, function: AnyFunction, args: Args, given: Sequence[torch.Tensor], result: object
    ) -> None:
        """Record the dimensions of a call's results; `given` are the tensors among its arguments."""
        chosen = self._chosen(function, args)
        before = [(each, self._dims[each]) for each in given if each in self._dims]
        if chosen is None and not before:
            return
        with untraced():
            for made in tensors(result):
                # A dimension stays the same one if it has the same place and size.
                dims = {
                    dim
                    for each, known in before
                    for dim in known
                    if made.dim() == each.dim() and made.shape[dim] == each.shape[dim]
                } | ({chosen} if chosen is not None else set())
                if dims and made.dim():
                    self._dims[made] = dims

    def read(self, function: AnyFunction, args: Args, result: Any) -> list[object]:
        """Return the sizes among a call's results, of those that read sizes, that follow from values."""
        dims = self._dims.get(args[0]) if args and isinstance(args[0], _T) else None
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

    def _chosen(self, function: AnyFunction, args: Args) -> int | None:
        """Return the dimension that an index or a function such as `nonzero` selects, or None."""
        name = getattr(function, "__name__", "")
        if name in _SELECTING or (name == "where" and len(args) == 1):
            return 0
        if function is not _T.__getitem__:
            return None
        place = 0
        for part in args[1] if isinstance(args[1], tuple) else args[1:]:
            if isinstance(part, _T) and (part.dtype in _MASKS or part in self._dims):
                return place
            place += part is None or isinstance(part, slice)
        return None

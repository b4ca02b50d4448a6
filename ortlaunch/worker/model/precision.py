"""The torch dtypes of the recipe's precisions."""

from __future__ import annotations

import torch

from ortlaunch.tables.precisions import PRECISIONS


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of forward and backward passes."""
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision].dtype)
    return dtype


def narrow_dtype_or_none(precision: str) -> torch.dtype | None:
    """Return the dtype of the passes, or None for float32, where nothing is cast."""
    return dtype_of(precision) if PRECISIONS[precision].is_narrow else None

"""torch's types of the recipe's precisions."""

from __future__ import annotations

import torch

from ortlaunch.precisions import PRECISIONS


def dtype_of(precision: str) -> torch.dtype:
    """The type of the passes."""
    found: torch.dtype = getattr(torch, PRECISIONS[precision].dtype)
    return found


def narrow_dtype_of(precision: str) -> torch.dtype | None:
    """The same; None for float32, in which nothing is cast."""
    return dtype_of(precision) if PRECISIONS[precision].is_narrow else None

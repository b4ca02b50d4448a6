"""The table of precisions: number formats of the passes, the values of the recipe's `precision`.

Standard library only, for every side; `recipe.format` is the row.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """One row; tolerance, floor and scale are of comparisons with plain PyTorch."""

    dtype: str
    """torch's name."""
    bytes: int
    """Of a number. Below 4 passes are by autocast, or in DeepSpeed's narrow weights."""
    tolerance: float
    """Above it, the largest relative difference is no rounding, unless float64 shows that it is (`ROUNDING`)."""
    floor: float
    """A gradient is measured against its own norm, or this share of the norm of all gradients if that is more.

    Some gradients are zero but for rounding, as those of attention's key biases: against their own norm, rounding would
    count as a difference of 100 %. What is left of terms that cancel is some roundings of those terms, which are at
    most of the size of the whole gradient: tolerance x floor is about ten roundings in fp32 (1e-6), two in fp16 (2e-3)
    and one in bf16 (1e-2). A wrong gradient smaller than that share of the whole passes unseen.
    """
    scale: float = 1.0
    """Factor on the loss before the backward pass, so that small gradients do not vanish."""
    scales_loss: bool = False
    """Whether training scales the loss, and skips steps until the scale fits."""

    @property
    def is_narrow(self) -> bool:
        """Whether passes have fewer bits than float32."""
        return self.bytes < 4


PRECISIONS = {
    "fp32": Precision("float32", 4, 1e-4, 1e-2),
    "fp16": Precision("float16", 2, 5e-2, 5e-2, scale=1024.0, scales_loss=True),
    "bf16": Precision("bfloat16", 2, 2e-1, 5e-2),
}

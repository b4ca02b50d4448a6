"""The table of precisions: floating-point formats of the passes, the recipe's `precision`.

Standard library only, for every side; `recipe.format` is the row.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """One row of the table; tolerance, floor and scale are for comparisons with plain PyTorch."""

    dtype: str
    """torch's name of the dtype."""
    bytes: int
    """Bytes of a value. Below 4, passes use autocast, or DeepSpeed's weights of that dtype."""
    tolerance: float
    """Largest relative difference that counts as rounding without a check in float64."""
    # Some gradients are zero except for rounding, such as those of attention's key biases. Relative
    # to their own norm, rounding would be a difference of 100 %. The error of terms that cancel is
    # a
    # few roundings of those terms, which are at most as large as the whole gradient. So tolerance x
    # floor is about ten roundings in fp32 (1e-6), two in fp16 (2e-3) and one in bf16 (1e-2). A
    # wrong
    # gradient below that share of the whole is not detected.
    floor: float
    """Least norm that a gradient's difference is divided by, as a share of the norm of all
    gradients."""
    scale: float = 1.0
    """Factor on the loss before the backward pass, so that small gradients do not underflow."""
    scales_loss: bool = False
    """Whether training scales the loss, and skips steps until the scale fits."""

    @property
    def is_narrow(self) -> bool:
        """Whether values of the passes have fewer bits than float32."""
        return self.bytes < 4


PRECISIONS = {
    "fp32": Precision("float32", 4, 1e-4, 1e-2),
    "fp16": Precision("float16", 2, 5e-2, 5e-2, scale=1024.0, scales_loss=True),
    "bf16": Precision("bfloat16", 2, 2e-1, 5e-2),
}

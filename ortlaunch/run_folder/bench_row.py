"""The form of a variant in bench.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class VariantRow(TypedDict, total=False):
    """A variant of a bench; one that was not measured has its reason in place of figures."""

    name: str
    engine: str
    varied: list[str]
    """Its changes of the recipe, as KEY=VALUE."""
    state: str
    """measured, refused or failed."""
    reason: str
    folder: str
    """The run folder of its job."""
    precision: str
    matmul_precision: str
    ranks: int
    seconds: dict[str, float]
    """Median, quartiles, minimum and maximum of a step."""
    samples_per_second: float
    tokens_per_second: float | None
    """Without padding; None: the model takes no tokens."""
    padding_share: float | None
    flops_per_token: float | None
    peak_flops: float | None
    """FLOP/s of one device at the most, measured on GPUs."""
    vendor_peak_flops: float | None
    """The same by the vendor's data sheet, for types of 16 bits."""
    memory: list[int]
    """Peak bytes of each rank."""
    first_step: dict[str, float]
    """Seconds to the end of the first step, since several moments."""
    parity: dict[str, object]
    """The verdict of the comparison with PyTorch, with its figures."""
    truth: dict[str, object]
    """engine.json."""
    turns: Sequence[dict[str, object]]
    """The answers of its job."""
    ratio: float
    """Samples a second, relative to those of `ratio_to`."""
    ratio_to: str
    mfu: float | None
    """Model FLOPs utilization, from 0 to 1, of the rate that was measured."""
    mfu_of_vendor_peak: float | None
    """The same of `vendor_peak_flops`."""

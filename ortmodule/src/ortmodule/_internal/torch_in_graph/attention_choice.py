"""Choice for each traced attention: torch's fused kernel, or written out in ORT's graph.

operator_translation.py uses it, and attention.py writes the call for CPUs. The kernel is used from
FUSED_ATTENTION_SCORES scores on, where it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ortmodule._internal.base.counters import tally

# Scores of a head, query by key positions. Measured on CPUs; ortlaunch plans memory by the same.
FUSED_ATTENTION_SCORES = 256 * 256


def stays_fused_if_listed_or_large_and_note_why_not(
    traced_inputs: Sequence[Any], device_type: str, is_mask_trained: bool, is_operator_listed: bool
) -> bool:
    """Return whether a traced attention stays torch's fused kernel; note why it cannot.

    Args:
        traced_inputs: the inputs of the traced call: query, key, value, mask, dropout probability, ...
        device_type: the device's type.
        is_mask_trained: whether the mask has a gradient.
        is_operator_listed: whether the settings list the operator, which then stays torch's at any length.
    """
    unfused_reason = _reason_without_fused_kernel_or_empty(
        traced_inputs, device_type, is_mask_trained
    )
    # An attention that the settings list, and that has no fused kernel, is any other call of torch.
    if is_operator_listed:
        return not unfused_reason
    if unfused_reason:
        tally.add_end_note_once(
            f"attention {unfused_reason} is written out in the graph: torch has no kernel for it"
        )
        return False
    score_count = math.prod(
        sizes[2] or 1 for sizes in map(_known_sizes_or_empty, traced_inputs[:2])
    )
    return score_count >= FUSED_ATTENTION_SCORES


def _reason_without_fused_kernel_or_empty(
    traced_inputs: Sequence[Any], device_type: str, is_mask_trained: bool
) -> str:
    """Return why torch has no fused kernel for an attention; empty if it has one."""
    sizes = [_known_sizes_or_empty(value) for value in traced_inputs[:3]]
    if is_mask_trained:
        return "with a mask that is trained"
    if any(value.node().kind() != "prim::Constant" for value in traced_inputs[4:7]):
        return "with a dropout, scale or causal flag that the forward pass computes"
    if device_type == "cpu" and traced_inputs[4].toIValue():
        return "with dropout on a CPU"
    if any(len(size) != 4 for size in sizes):
        return "of tensors without batch or heads"
    if any((sizes[0][1] or 1) % (size[1] or 1) for size in sizes):
        return "with more heads of keys than of queries"
    return "with values of another size than the keys" if sizes[1][3] != sizes[2][3] else ""


def _known_sizes_or_empty(traced_value: Any) -> Sequence[int | None]:
    sizes: Sequence[int | None] | None = traced_value.type().sizes()
    return sizes or ()

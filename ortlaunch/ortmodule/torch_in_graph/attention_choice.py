"""Choice for each traced attention: torch's fused kernel, or written out in ORT's graph.

operator_translation.py uses it, and attention.py writes the call for CPUs. The kernel is used from
FUSED_ATTENTION_SCORES scores on (ortlaunch/machine.py), where it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ortlaunch import machine
from ortlaunch.ortmodule.base.counters import tally


def is_fused(inputs: Sequence[Any], device: str, learns_mask: bool, listed: bool) -> bool:
    """Return whether a traced attention stays torch's fused kernel; note why it cannot.

    Args:
        inputs: the inputs of the traced call: query, key, value, mask, dropout probability, ...
        device: the device's type.
        learns_mask: whether the mask has a gradient.
        listed: whether the settings list the operator, which then stays torch's at any length.
    """
    obstacle = _obstacle(inputs, device, learns_mask)
    # An attention that the settings list, and that has no fused kernel, is any other call of torch.
    if listed:
        return not obstacle
    if obstacle:
        tally.note(f"attention {obstacle} is written out in the graph: torch has no kernel for it")
        return False
    scores = math.prod(size[2] or 1 for size in map(_sizes, inputs[:2]))
    return scores >= machine.FUSED_ATTENTION_SCORES


def _obstacle(inputs: Sequence[Any], device: str, learns_mask: bool) -> str:
    """Return why torch has no fused kernel for an attention; empty if it has one."""
    sizes = [_sizes(one) for one in inputs[:3]]
    if learns_mask:
        return "with a mask that is trained"
    if any(one.node().kind() != "prim::Constant" for one in inputs[4:7]):
        return "with a dropout, scale or causal flag that the forward pass computes"
    if device == "cpu" and inputs[4].toIValue():
        return "with dropout on a CPU"
    if any(len(size) != 4 for size in sizes):
        return "of tensors without batch or heads"
    if any((sizes[0][1] or 1) % (size[1] or 1) for size in sizes):
        return "with more heads of keys than of queries"
    return "with values of another size than the keys" if sizes[1][3] != sizes[2][3] else ""


def _sizes(value: Any) -> Sequence[int | None]:
    sizes: Sequence[int | None] | None = value.type().sizes()
    return sizes or ()

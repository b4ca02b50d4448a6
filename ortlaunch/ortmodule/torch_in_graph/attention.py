"""Attention as torch's fused kernel inside ORT's graph, without materialized causal masks.

The module does not import transformers. It patches transformers' mask module only if the model has
imported it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from ortlaunch import machine
from ortlaunch.ortmodule.base.export import Export

NAME = "aten::scaled_dot_product_attention"
# Any: the functions that read and pause a trace have no stubs.
_TRACER: Any = torch._C
_MASKS = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"
# Operators that keep positions 0, 1, 2, ... consecutive.
_COUNTING = {
    "aten::arange", "aten::add", "aten::unsqueeze", "aten::expand", "aten::to", "aten::view", "aten::reshape",
    "prim::NumToTensor", "aten::Int", "aten::ScalarImplicit", "prim::ListConstruct", "prim::Constant", "aten::size",
}  # fmt: skip


def is_fused(inputs: Sequence[Any], device: str, learns_mask: bool) -> bool:
    """Return whether torch's fused kernel computes a traced attention faster than ONNX nodes do.

    Args:
        inputs: the inputs of the traced call: query, key, value, mask, dropout probability, ...
        device: the device's type.
        learns_mask: whether the mask has a gradient, for which torch has no fused kernel.
    """
    query, key, value, _, dropout = inputs[:5]
    sizes = [one.type().sizes() for one in (query, key, value)]
    if learns_mask or any(size is None or len(size) != 4 for size in sizes):
        return False
    if sizes[0][2] * sizes[1][2] < machine.FUSED_ATTENTION_SCORES or sizes[1][3] != sizes[2][3]:
        return False
    # torch has no fused CPU kernel with dropout.
    return device != "cpu" or not dropout.toIValue()


@contextlib.contextmanager
def without_causal_masks(export: Export) -> Iterator[None]:
    """Let transformers leave out causal masks in an export, as it does in eager mode.

    Under a trace transformers always searches the position ids for packed documents, so it
    materializes the mask. The fused kernel then computes both halves of the scores instead of one.
    """
    masks = sys.modules.get(_MASKS)
    original: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(masks, _PACKED, None)
    if original is None:
        yield
        return

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        if torch.jit.is_tracing() and _count_on(positions):
            # Pause the trace: only outside a trace does transformers compare the values of the
            # position ids, and return None if there is one document.
            state = _TRACER._get_tracing_state()
            _TRACER._set_tracing_state(None)
            try:
                if original(positions) is None:
                    return None
            finally:
                _TRACER._set_tracing_state(state)
        return original(positions)

    with mock.patch.object(masks, _PACKED, find):
        yield


def _count_on(positions: torch.Tensor) -> bool:
    """Return whether the model itself counted the positions, from sizes and constants alone.

    Such positions are consecutive for every batch.
    """
    remaining = [_TRACER._get_value_trace(positions)]
    while remaining:
        node = remaining.pop().node()
        if node.kind() not in _COUNTING:
            return False
        if node.kind() != "aten::size":
            remaining += node.inputs()
    return True

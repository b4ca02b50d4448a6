"""Attention that stays torch's fused kernel in ORT's graph, and causal masks that are not written out.

Imports no transformers: its module of masks is changed where a model has imported it.
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
_TRACER: Any = torch._C  # its functions that read and pause a trace have no stubs
_MASKS = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"
# Operators by which positions of 0, 1, 2, ... stay positions that count on by one.
_COUNTING = {
    "aten::arange", "aten::add", "aten::unsqueeze", "aten::expand", "aten::to", "aten::view", "aten::reshape",
    "prim::NumToTensor", "aten::Int", "aten::ScalarImplicit", "prim::ListConstruct", "prim::Constant", "aten::size",
}  # fmt: skip


def is_fused(inputs: Sequence[Any], device: str, learns_mask: bool) -> bool:
    """Return whether torch's fused kernel computes a traced attention faster than nodes of the graph do.

    inputs: of the traced call: query, key, value, mask, share of dropout, ...
    device: its type.
    learns_mask: the mask has a gradient, for which torch has no fused kernel.
    """
    query, key, value, _, dropout = inputs[:5]
    sizes = [one.type().sizes() for one in (query, key, value)]
    if learns_mask or any(size is None or len(size) != 4 for size in sizes):
        return False
    if sizes[0][2] * sizes[1][2] < machine.FUSED_ATTENTION_SCORES or sizes[1][3] != sizes[2][3]:
        return False
    return (
        device != "cpu" or not dropout.toIValue()
    )  # torch has no fused kernel for CPUs with dropout


@contextlib.contextmanager
def without_causal_masks(export: Export) -> Iterator[None]:
    """While open, transformers leave out a causal mask where they do in eager PyTorch for want of packed documents.

    In a trace they always search the positions for documents, so that the mask is written out: the fused kernel then
    computes both halves of the scores instead of one.
    """
    masks = sys.modules.get(_MASKS)
    original: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(masks, _PACKED, None)
    if original is None:
        yield
        return

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        if torch.jit.is_tracing() and _count_on(positions):
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
    """Whether positions were counted by the model itself, whatever the batch: of its sizes and constants alone."""
    remaining = [_TRACER._get_value_trace(positions)]
    while remaining:
        node = remaining.pop().node()
        if node.kind() not in _COUNTING:
            return False
        if node.kind() != "aten::size":
            remaining += node.inputs()
    return True

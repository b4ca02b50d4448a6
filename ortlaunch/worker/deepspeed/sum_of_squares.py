"""The sum of squares of many tensors in one pass, as exact as in double precision; finite only where they all are.

Float32 carries few terms exactly, so large tensors are summed in short pieces and the pieces in float64. Knows
nothing of DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 256  # elements summed in float32 on CPU: at worst (all equal) 4e-7 off float64; 512 save a tenth and give 9e-7
_BLOCK = 2**20  # elements cast at once, so that the cast stays in the cache
_SMALLEST_MEAN = (
    1e-30  # of squares: below, float32's underflow at 1e-38 would show in the seventh digit
)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum over all elements of all tensors, a float64 scalar on their device; inf or nan where one element is.

    Args:
        tensors: of one device, at least one; float32, float16 or bfloat16, dense, of any shape, also empty.
    """
    full = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not full:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    total = _on_cpu(full) if full[0].device.type == "cpu" else _on_accelerator(full)
    smallest = _SMALLEST_MEAN * sum(tensor.numel() for tensor in full)
    # Float32 squares of finite elements overflow from 1e19 and vanish below 1e-19: neither must be mistaken.
    return total if smallest <= float(total) < math.inf else _in_double(full)


def _on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    norms = []
    rests = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // _ROW * _ROW
        # PyTorch's `_foreach_norm` loops on CPU; rows of one matrix take one call, many threads and no stack.
        for block in flat[:whole].split(_BLOCK):
            rows = block.view(block.numel() // _ROW, _ROW)
            norms.append(torch.linalg.vector_norm(rows.float(), dim=1))
        rests.append(flat[whole:].float())
    norms.append(torch.stack(torch._foreach_norm(rests)))
    return torch.cat(norms).double().square().sum()


def _on_accelerator(tensors: Sequence[Tensor]) -> Tensor:
    """One kernel over all tensors, which itself sums pieces of 64k elements in a tree."""
    return (
        torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
        .double()
        .square()
        .sum()
    )


def _in_double(tensors: Sequence[Tensor]) -> Tensor:
    """The slow way, for what float32 cannot square: 1e38 squared still has room in float64."""
    blocks = [block for tensor in tensors for block in tensor.reshape(-1).split(_BLOCK)]
    return torch.stack([block.double().square().sum() for block in blocks]).sum()

"""torch.nn.functional.pad in an export.

Integers, such as a Llama's shifted labels, are padded by concatenation: ORT's Pad has no CUDA
kernel for them, and would copy them to the CPU and back in each step, with a wait. Negative amounts
are slices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.patching import replace_attribute_temporarily


def replace_torch_pad_temporarily(export_context: ExportContext) -> AbstractContextManager[Any]:
    """Replace torch.nn.functional.pad for an export.

    While open, pad concatenates integers with constants, and crops by slices.
    """
    torch_nn: Any = torch._C._nn
    original_pad = torch_nn.pad

    @functools.wraps(original_pad)
    def pad(
        x: Any, amounts: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> Any:
        if mode != "constant" or torch.is_complex(x):
            return original_pad(x, amounts, mode, value)
        x = _crop_by_negative_amounts(x, amounts)
        amounts = [max(0, amount) for amount in amounts]
        # The clone of an unpadded tensor is a new tensor, as pad's result always is.
        if x.is_floating_point() or x.dtype == torch.bool:
            return original_pad(x, amounts, mode, value) if any(amounts) else x.clone()
        for amount_index in range(0, len(amounts), 2):
            # Amounts are listed in pairs from the last dimension backwards.
            axis = x.dim() - 1 - amount_index // 2
            # The sum over the axis gives the slice's shape without a size that the trace would fix.
            padding_slice = torch.full_like(
                x.sum(axis, keepdim=True, dtype=x.dtype), int(value or 0)
            )
            padding_before, padding_after = (
                [padding_slice.expand([count if dim == axis else -1 for dim in range(x.dim())])]
                if count
                else []
                for count in amounts[amount_index : amount_index + 2]
            )
            x = (
                torch.cat([*padding_before, x, *padding_after], axis)
                if padding_before or padding_after
                else x
            )
        return x

    return replace_attribute_temporarily(torch_nn, "pad", pad)


def _crop_by_negative_amounts(tensor: torch.Tensor, padding_amounts: Sequence[int]) -> torch.Tensor:
    """Return the part that negative amounts leave.

    ORT's Pad reads outside of a tensor if the amounts leave nothing of it.
    """
    parts = [slice(None)] * tensor.dim()
    for amount_index in range(0, len(padding_amounts), 2):
        amount_before, amount_after = padding_amounts[amount_index : amount_index + 2]
        parts[tensor.dim() - 1 - amount_index // 2] = slice(
            max(0, -amount_before), min(0, amount_after) or None
        )
    return tensor[tuple(parts)] if min(padding_amounts, default=0) < 0 else tensor

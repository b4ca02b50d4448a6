"""ONNX Runtime's FusedAdam (CUDA only) with torch's weight decay, and torch's where it cannot run.

Imports no DeepSpeed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.json_types import Json

# multi_tensor_adam.cu of ONNX Runtime 1.19.2: `int sizes[]`, and `chunk_idx * chunk_size` in int.
MOST_ELEMENTS = 2**31
ONNXRUNTIME = "onnxruntime.training.optim.FusedAdam"
TORCH = "torch.optim.AdamW(fused=True)"


def FusedAdam(
    params: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Return ONNX Runtime's FusedAdam on CUDA, torch's fused AdamW elsewhere.

    Weight decay is applied as in `torch.optim.AdamW`. The defaults are those of ONNX Runtime's
    class. A replacement is a warning, and a note in `ORTModule.report()`.

    Args:
        params: parameters or parameter groups, float32 or float16, all on one device.
        lr: the learning rate.
        betas: the decay rates of the two moments.
        eps: the value added to the denominator.
        weight_decay: the decoupled weight decay.
    """
    groups = as_parameter_groups(params)
    settings: Json = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    reason = reason_ort_adam_is_unsupported_or_empty(groups)
    if not reason:
        return fused_adam(groups, **settings)
    message = f"FusedAdam: {TORCH} runs instead: {reason}"
    tally.add_end_note_once(message)
    warnings.warn(message, stacklevel=2)
    return torch.optim.AdamW(groups, fused=True, **settings)


def as_parameter_groups(
    parameters_or_groups: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return parameter groups, each with a list of parameters."""
    group_items: list[Any] = list(parameters_or_groups)
    groups = (
        group_items
        if group_items and isinstance(group_items[0], Mapping)
        else [{"params": group_items}]
    )
    return [{**group, "params": list(group["params"])} for group in groups]


def reason_ort_adam_is_unsupported_or_empty(adam_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return why ONNX Runtime's FusedAdam cannot update these parameters; empty if it can."""
    parameters = [parameter for group in adam_groups for parameter in group["params"]]
    if any(parameter.device.type != "cuda" for parameter in parameters):
        return "ONNX Runtime's is for CUDA only"
    return reason_tensor_is_too_large_or_empty([parameter.numel() for parameter in parameters])


def reason_tensor_is_too_large_or_empty(element_counts: Iterable[int]) -> str:
    """Return why FusedAdam cannot count the elements of one of the tensors; empty if it can."""
    largest = max(element_counts, default=0)
    if largest < MOST_ELEMENTS:
        return ""
    return (
        f"ONNX Runtime's FusedAdam counts in int32, and a tensor has {largest:,} elements on a rank"
    )


def fused_adam(groups: list[dict[str, Any]], **settings: object) -> torch.optim.Optimizer:
    """Return ONNX Runtime's FusedAdam over groups of float32 or float16 parameters."""
    from onnxruntime.training.optim import FusedAdam
    from onnxruntime.training.optim.fused_adam import AdamWMode

    # ADAMW_TORCH applies weight decay as torch.optim.AdamW does.
    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, adam_w_mode=AdamWMode.ADAMW_TORCH, **settings
    )
    return optimizer

"""ONNX Runtime's FusedAdam (CUDA only) with torch's weight decay, and torch's where it cannot run.

Imports no DeepSpeed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    built = build_torch_adamw(groups, **settings)
    reasons = "; ".join(filter(None, (reason, built.not_fused_reason)))
    message = f"FusedAdam: {built.used} runs instead: {reasons}"
    tally.add_end_note_once(message)
    warnings.warn(message, stacklevel=2)
    return built.optimizer


class TorchAdamW(NamedTuple):
    """An AdamW of torch."""

    optimizer: torch.optim.Optimizer
    used: str
    """The name of its class, with the arguments that matter."""
    not_fused_reason: str
    """Why it is not torch's fused one; empty if it is."""


def build_torch_adamw(groups: Sequence[dict[str, Any]], **adam_settings: Any) -> TorchAdamW:
    """Build torch's AdamW: its fused kernel where it has one, and else that of lists.

    Args:
        groups: parameter groups.
        adam_settings: further arguments of torch.optim.AdamW.
    """
    reason = _reason_adam_is_not_fused_or_empty(groups)
    if reason:
        optimizer = torch.optim.AdamW(groups, foreach=True, **adam_settings)
        return TorchAdamW(optimizer, "torch.optim.AdamW(foreach=True)", reason)
    optimizer = torch.optim.AdamW(groups, fused=True, **adam_settings)
    optimizer.register_step_pre_hook(_give_gradients_the_strides_of_parameters)
    return TorchAdamW(optimizer, TORCH, "")


def _reason_adam_is_not_fused_or_empty(groups: Sequence[Mapping[str, Any]]) -> str:
    for parameter in (parameter for group in groups for parameter in group["params"]):
        text = f"a parameter of shape {tuple(parameter.shape)}"
        if not parameter.is_floating_point():
            return f"{text} has type {str(parameter.dtype).rpartition('.')[2]}"
        # torch 2.13's kernel for CPUs reads the memory between the elements, and updates wrongly.
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            return f"{text} has gaps or overlaps in memory"
    return ""


def _give_gradients_the_strides_of_parameters(
    optimizer: torch.optim.Optimizer, _args: object, _kwargs: object
) -> None:
    """Copy gradients of other strides than their parameter's; a hook before a step.

    Fused kernels read both in the order of memory, and would mix elements (torch 2.13 on a CPU).
    """
    for parameter in (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ):
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


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
    return reason_tensor_is_too_large_or_empty(
        [parameter.numel() for parameter in parameters]
    ) or _reason_adam_is_not_fused_or_empty(adam_groups)


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
    optimizer.register_step_pre_hook(_give_gradients_the_strides_of_parameters)
    return optimizer

"""One pass for the overflow check and the gradient norm of DeepSpeed's ZeRO 1 and 2 optimizer.

It is ONNX Runtime's FP16_Optimizer where that knows the installed DeepSpeed, else ours.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.deepspeed.gradient_norm import (
    GradientNormProvider,
    replace_overflow_check_and_norm_if_supported,
)

# The methods that ONNX Runtime's FP16_Optimizer sets on an optimizer that it supports.
_REPLACED_METHODS = (
    "has_overflow_serial",
    "get_grad_norm_direct",
    "has_overflow_partitioned_grads_serial",
)
_Optimizer = TypeVar("_Optimizer")


def FP16_Optimizer(optimizer: _Optimizer) -> _Optimizer:
    """Measure a DeepSpeed optimizer's gradients once a step, instead of DeepSpeed's several times.

    It supports ZeRO 1 and 2 of every DeepSpeed since 0.16, in every precision, on CPU and CUDA.
    The training is DeepSpeed's: it is faster, not different. An optimizer that is not supported
    stays unchanged; the reason is a warning, and a note in `ORTModule.report()`.

    Args:
        optimizer: the optimizer that `deepspeed.initialize` returned.

    Returns:
        The same object.
    """
    groups: Any = getattr(optimizer, "param_groups", None) or [{"params": []}]
    devices = {parameter.device.type for parameter in groups[0]["params"]}
    provider = fuse_overflow_check_and_norm_by_ort_or_own(optimizer, next(iter(devices), "cpu"))
    if not provider.applied:
        message = f"FP16_Optimizer changed nothing: {provider.why}"
        tally.add_end_note_once(message)
        warnings.warn(message, stacklevel=2)
    return optimizer


def fuse_overflow_check_and_norm_by_ort_or_own(
    deepspeed_optimizer: Any, device_type: str
) -> GradientNormProvider:
    """Replace the overflow check and gradient norm by ONNX Runtime's, else by ours.

    Args:
        deepspeed_optimizer: DeepSpeed's optimizer.
        device_type: the type of the device of its parameters.
    """
    ort_reason = apply_ort_fp16_optimizer_or_get_refusal_reason(deepspeed_optimizer, device_type)
    if not ort_reason:
        return GradientNormProvider(True, "onnxruntime", "")
    own_provider = replace_overflow_check_and_norm_if_supported(deepspeed_optimizer)
    return own_provider._replace(
        why="; ".join(reason for reason in (ort_reason, own_provider.why) if reason)
    )


def apply_ort_fp16_optimizer_or_get_refusal_reason(
    deepspeed_optimizer: object, device_type: str
) -> str:
    """Replace the overflow check and gradient norm of DeepSpeed's ZeRO 1 or 2 optimizer.

    Returns:
        The reason if ONNX Runtime's FP16_Optimizer did nothing; empty if it took effect.
    """
    import deepspeed

    if device_type != "cuda":
        return "ONNX Runtime's is for CUDA"
    from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer

    # For an optimizer that it does not support, FP16_Optimizer gives at most a warning.
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        FP16_Optimizer(deepspeed_optimizer)
    if all(name in vars(deepspeed_optimizer) for name in _REPLACED_METHODS):
        return ""
    optimizer_name = type(deepspeed_optimizer).__name__
    reason = (
        str(caught_warnings[0].message).splitlines()[0]
        if caught_warnings
        else f"it does not know {optimizer_name}"
    )
    supported_text = "ZeRO 1 and 2 of DeepSpeed 0.9.2-0.13.1"
    installed_text = f"{optimizer_name} of {deepspeed.__version__}"
    return f"ONNX Runtime 1.19.2 knows {supported_text}, this is {installed_text}: {reason}"

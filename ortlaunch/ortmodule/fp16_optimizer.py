"""One pass for the overflow check and the gradient norm of DeepSpeed's ZeRO 1 and 2 optimizer.

It is ONNX Runtime's FP16_Optimizer where that knows the installed DeepSpeed, else ours.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.deepspeed.gradient_norm import Applied, fuse_gradient_norm

# The methods that ONNX Runtime's FP16_Optimizer sets on an optimizer that it supports.
_REPLACED = ("has_overflow_serial", "get_grad_norm_direct", "has_overflow_partitioned_grads_serial")
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
    applied = fuse(optimizer, next(iter(devices), "cpu"))
    if not applied.applied:
        note = f"FP16_Optimizer changed nothing: {applied.why}"
        tally.note(note)
        warnings.warn(note, stacklevel=2)
    return optimizer


def fuse(optimizer: Any, device: str) -> Applied:
    """Replace the overflow check and gradient norm by ONNX Runtime's, else by ours.

    Args:
        optimizer: DeepSpeed's optimizer.
        device: the type of the device of its parameters.
    """
    why = apply_fp16_optimizer(optimizer, device)
    if not why:
        return Applied(True, "onnxruntime", "")
    ours = fuse_gradient_norm(optimizer)
    return ours._replace(why="; ".join(reason for reason in (why, ours.why) if reason))


def apply_fp16_optimizer(optimizer: object, device: str) -> str:
    """Replace the overflow check and gradient norm of DeepSpeed's ZeRO 1 or 2 optimizer.

    Returns:
        The reason if ONNX Runtime's FP16_Optimizer did nothing; empty if it took effect.
    """
    import deepspeed

    if device != "cuda":
        return "ONNX Runtime's is for CUDA"
    from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer

    # For an optimizer that it does not support, FP16_Optimizer gives at most a warning.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FP16_Optimizer(optimizer)
    if all(name in vars(optimizer) for name in _REPLACED):
        return ""
    kind = type(optimizer).__name__
    reason = str(said[0].message).splitlines()[0] if said else f"it does not know {kind}"
    known = "ZeRO 1 and 2 of DeepSpeed 0.9.2-0.13.1"
    this = f"{kind} of {deepspeed.__version__}"
    return f"ONNX Runtime 1.19.2 knows {known}, this is {this}: {reason}"

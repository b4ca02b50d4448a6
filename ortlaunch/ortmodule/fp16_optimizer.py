"""ONNX Runtime's FP16_Optimizer on a DeepSpeed optimizer, with a check that it took effect."""

from __future__ import annotations

import warnings

# The methods that FP16_Optimizer sets on an optimizer that it supports.
_REPLACED = ("has_overflow_serial", "get_grad_norm_direct", "has_overflow_partitioned_grads_serial")


def apply_fp16_optimizer(optimizer: object, device: str) -> str:
    """Replace the overflow check and gradient norm of DeepSpeed's ZeRO 1 or 2 optimizer.

    Returns:
        The reason if FP16_Optimizer did nothing; empty if it took effect.
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

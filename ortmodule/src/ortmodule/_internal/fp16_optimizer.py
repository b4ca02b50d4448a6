"""One pass for the overflow check and the gradient norm of DeepSpeed's ZeRO 1 and 2 optimizer.

ONNX Runtime's FP16_Optimizer does the same for DeepSpeed 0.9.2 to 0.13.1 alone, on CUDA.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from ortmodule._internal.base.counters import tally
from ortmodule._internal.deepspeed.gradient_norm import fuse_gradient_norm_or_get_reason

_Optimizer = TypeVar("_Optimizer")


def FP16_Optimizer(optimizer: _Optimizer) -> _Optimizer:
    """Measure a DeepSpeed optimizer's gradients once a step, instead of DeepSpeed's several times.

    It supports ZeRO 1 and 2 of every DeepSpeed since 0.17.6, in every precision, on CPU and CUDA.
    The training is DeepSpeed's: it is faster, not different. An optimizer that is not supported
    stays unchanged; the reason is a warning, and a note in `ORTModule.report()`.

    Args:
        optimizer: the optimizer that `deepspeed.initialize` returned.

    Returns:
        The same object.
    """
    deepspeed_optimizer: Any = optimizer
    reason = fuse_gradient_norm_or_get_reason(deepspeed_optimizer)
    if reason:
        message = f"FP16_Optimizer changed nothing: {reason}"
        tally.add_end_note_once(message)
        warnings.warn(message, stacklevel=2)
    return optimizer

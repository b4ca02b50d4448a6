"""ONNX Runtime's FusedAdam (CUDA only) with torch's weight decay, for comparable engines."""

from __future__ import annotations

import torch


def fused_adam(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    """Return a FusedAdam over parameter groups of float32 or float16 parameters."""
    from onnxruntime.training.optim import FusedAdam
    from onnxruntime.training.optim.fused_adam import AdamWMode

    # ADAMW_TORCH applies weight decay as torch.optim.AdamW does.
    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, adam_w_mode=AdamWMode.ADAMW_TORCH, **settings
    )
    return optimizer

"""ONNX Runtime's FusedAdam (CUDA only), in torch's way of weight decay so that engines can be compared."""

from __future__ import annotations

import torch


def fused_adam(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    """FusedAdam over parameter groups; takes float32 and float16."""
    from onnxruntime.training.optim import FusedAdam
    from onnxruntime.training.optim.fused_adam import AdamWMode

    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, adam_w_mode=AdamWMode.ADAMW_TORCH, **settings
    )
    return optimizer

"""Types of DeepSpeed's objects, as far as this package uses them: stubs for the type checker.

DeepSpeed 0.19.8 has no type information of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class ZeroOneOrTwoOptimizer(Protocol):
    """DeepSpeedZeroOptimizer (ZeRO 1 and 2) and BF16_Optimizer."""

    averaged_gradients: dict[int, Sequence[Tensor | None]]
    bit16_groups: Sequence[Sequence[torch.nn.Parameter]]
    cpu_offload: bool
    dp_process_group: torch.distributed.ProcessGroup
    has_moe_layers: bool
    model_parallel_group: object
    optimizer: torch.optim.Optimizer
    params_in_partition: Sequence[Sequence[torch.nn.Parameter]]

    def get_grad_norm_direct(
        self,
        gradients: Sequence[Tensor],
        params: Sequence[torch.nn.Parameter],
        norm_type: float = 2,
    ) -> Tensor: ...
    def update_lp_params(self) -> None: ...

"""Types of DeepSpeed's objects, as far as this package uses them: stubs for the type checker.

DeepSpeed 0.19.8 has no type information of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class UnshardedMasterWeights(Protocol):
    """FP16_UnfusedOptimizer: a float32 master weight for each parameter."""

    fp16_groups: Sequence[Sequence[Tensor]]
    fp32_groups: Sequence[Sequence[Tensor]]
    optimizer: torch.optim.Optimizer


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


class ZeroThreeParameter(Protocol):
    """A parameter of ZeRO 3."""

    ds_numel: int

    def all_gather(self, parameters: Sequence[ZeroThreeParameter]) -> object: ...
    def partition_numel(self) -> int: ...


class ZeroThreeOptimizer(Protocol):
    """DeepSpeedZeroOptimizer_Stage3 (ZeRO 3)."""

    fp16_groups: Sequence[Sequence[Tensor]]
    fp32_partitioned_groups_flat: Sequence[Tensor]
    grad_position: dict[int, tuple[int, int, int]]
    optimizer: torch.optim.Optimizer
    persistent_parameters: Sequence[ZeroThreeParameter]
    sub_group_to_group_id: dict[int, int]

    def get_param_id(self, parameter: Tensor) -> int: ...
    def _partition_all_parameters(self) -> None: ...
    def _reassign_or_swap_out_partitioned_parameters(self, flat: int) -> None: ...

"""A fused pass for the overflow check and the gradient norm of DeepSpeed's ZeRO 1 and 2 optimizer.

DeepSpeed reads every gradient for the check, then casts each one to double for the norm. Here the
check computes the sums of squares once, and the norm that follows reuses them. The norm does the
same all-reduce as DeepSpeed's. Clipping and skipped steps stay DeepSpeed's.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ortmodule._internal.deepspeed.known_sources import reason_deepspeed_source_is_unknown_or_empty
from ortmodule._internal.deepspeed.sum_of_squares import float64_sum_of_squares
from ortmodule._internal.deepspeed.zero_types import ZeroOneOrTwoOptimizer

# The methods of the optimizer that are replaced.
_REPLACED_METHODS = ("has_overflow_partitioned_grads_serial", "get_grad_norm_direct")
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


def fuse_gradient_norm_or_get_reason(
    deepspeed_optimizer: ZeroOneOrTwoOptimizer,
) -> str:
    """Replace those methods of this optimizer that read all gradients.

    Returns:
        Why this optimizer is not supported and stays unchanged; empty: it has the methods.
    """
    if reason := _reason_optimizer_is_unsupported_or_empty(deepspeed_optimizer):
        return reason
    fused_pass = _FusedNormMethods(deepspeed_optimizer)
    # Set on the instance only.
    for name in _REPLACED_METHODS:
        setattr(deepspeed_optimizer, name, getattr(fused_pass, name))
    return ""


def _reason_optimizer_is_unsupported_or_empty(deepspeed_optimizer: ZeroOneOrTwoOptimizer) -> str:
    """Return why this optimizer is left unchanged, or ""."""
    # Local imports: DeepSpeed is optional.
    import deepspeed
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    # The exact type: a subclass may override methods that the fused pass relies on.
    if type(deepspeed_optimizer) is not DeepSpeedZeroOptimizer:
        return f"only ZeRO 1 and 2 are supported, not {type(deepspeed_optimizer).__name__}"
    if source_reason := reason_deepspeed_source_is_unknown_or_empty(DeepSpeedZeroOptimizer):
        return f"DeepSpeed {deepspeed.__version__} is not supported: {source_reason}"
    if any(name in vars(deepspeed_optimizer) for name in _REPLACED_METHODS):
        return "the optimizer is modified already"
    return next(
        (
            reason
            for is_present, reason in _presence_and_reason_of_unsupported_properties(
                deepspeed_optimizer
            )
            if is_present
        ),
        "",
    )


def _presence_and_reason_of_unsupported_properties(
    deepspeed_optimizer: ZeroOneOrTwoOptimizer,
) -> list[tuple[bool, str]]:
    """Return (found, reason) for each property that the fused pass does not support."""
    parameters = [parameter for group in deepspeed_optimizer.bit16_groups for parameter in group]
    return [
        (
            deepspeed_optimizer.cpu_offload,
            "with CPU offload DeepSpeed measures gradients as it copies them",
        ),
        (deepspeed_optimizer.has_moe_layers, "mixtures of experts are not supported"),
        (
            deepspeed_optimizer.model_parallel_group is not None,
            "model parallelism is not supported",
        ),
        (
            any(getattr(p, "ds_pipe_replicated", False) for p in parameters),
            "pipeline parallelism is not supported",
        ),
        (
            not {p.dtype for p in parameters} <= _DTYPES,
            "only float32, float16 and bfloat16 are supported",
        ),
        (
            not {p.device.type for p in parameters} <= {"cpu", "cuda"},
            "only CPU and CUDA are supported",
        ),
    ]


class PartitionGradients(NamedTuple):
    """The gradients of a rank's partition."""

    counted: list[Tensor]
    """In the norm and in the overflow check."""
    others: list[Tensor]
    """Padding and surplus: in the overflow check only."""


class _FusedNormMethods:
    """The replacement methods, and the sums of squares that the check keeps for the norm."""

    def __init__(self, deepspeed_optimizer: ZeroOneOrTwoOptimizer) -> None:
        self.optimizer = deepspeed_optimizer
        # One entry per parameter group with gradients on this rank, until its norm is computed.
        self.kept_squares: list[tuple[_TensorVersions, Tensor]] = []

    def has_overflow_partitioned_grads_serial(self) -> Tensor:
        """Return a bool tensor of shape (1,): whether a gradient of this rank has inf or nan."""
        optimizer = self.optimizer
        sums = []
        self.kept_squares = []
        for i in range(len(optimizer.bit16_groups)):
            gradients = [
                gradient for gradient in optimizer.averaged_gradients[i] if gradient is not None
            ]
            partition_gradients = _partition_gradients(gradients, optimizer.params_in_partition[i])
            squares = [
                float64_sum_of_squares(tensors) if tensors else None
                for tensors in partition_gradients
            ]
            if squares[0] is not None:
                self.kept_squares.append((_TensorVersions(partition_gradients.counted), squares[0]))
            sums += [square for square in squares if square is not None]
        if not sums:
            return torch.zeros(1, dtype=torch.bool, device=self._device())
        # The sums are float64, so they are finite exactly if all elements are.
        return torch.stack(sums).isfinite().all().logical_not().reshape(1)

    def get_grad_norm_direct(
        self,
        gradients: Sequence[Tensor],
        params: Sequence[torch.nn.Parameter],
        norm_type: float = 2,
    ) -> Tensor:
        """Return the norm of a parameter group over all ranks, a float32 scalar (collective).

        It is -1 in place of inf or nan, as in DeepSpeed.
        """
        optimizer = self.optimizer
        # Sums of squares give only the 2-norm. Other norms are DeepSpeed's.
        if float(norm_type) != 2.0:
            original_norm = types.MethodType(type(optimizer).get_grad_norm_direct, optimizer)
            norm: Tensor = original_norm(gradients, params, norm_type)
            return norm
        import deepspeed.comm as dist

        norm_gradients = _partition_gradients(gradients, params).counted
        total = self._take_kept_or_compute_sum_of_squares(norm_gradients).float()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
        total = total.sqrt()
        return total.masked_fill_(total.isfinite().logical_not(), -1.0)

    def _take_kept_or_compute_sum_of_squares(self, norm_gradients: list[Tensor]) -> Tensor:
        """Return the sum of squares that the check has kept for these gradients, or compute it.

        A kept sum is used once.
        """
        for i, (tensor_versions, squares) in enumerate(self.kept_squares):
            if tensor_versions.are_same_unchanged_tensors(norm_gradients):
                del self.kept_squares[i]
                return squares
        return (
            float64_sum_of_squares(norm_gradients)
            if norm_gradients
            else torch.zeros((), dtype=torch.float64, device=self._device())
        )

    def _device(self) -> torch.device:
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())


class _TensorVersions:
    """The identity and version of tensors, to detect that one was replaced or changed in place."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Weak references, so that no gradient is kept alive; torch counts changes in `_version`.
        self.tensors = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    def are_same_unchanged_tensors(self, compared_tensors: Sequence[Tensor]) -> bool:
        return len(compared_tensors) == len(self.tensors) and all(
            version == tensor._version and reference() is tensor
            for tensor, (reference, version) in zip(compared_tensors, self.tensors)
        )


def _partition_gradients(
    gradients: Sequence[Tensor], partition_parameters: Sequence[torch.nn.Parameter]
) -> PartitionGradients:
    real_gradients = [
        gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)
    ]
    padding_gradients = [
        gradient for gradient in gradients if getattr(gradient, "_zero_padding", False)
    ]
    return PartitionGradients(
        real_gradients[: len(partition_parameters)],
        [*real_gradients[len(partition_parameters) :], *padding_gradients],
    )

"""The location of master weights and optimizer state in DeepSpeed's optimizers, by parameter name.

Supported: no ZeRO (torch's optimizer, or a master weight for each parameter), ZeRO 1 and 2
(`_hp_mapping` of each parameter), ZeRO 3 (`grad_position`), as in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ortlaunch.base.errors import CheckpointError
from ortlaunch.worker.deepspeed.autotp import slice_of_autotp_rank
from ortlaunch.worker.deepspeed.zero_types import (
    UnshardedMasterWeights,
    ZeroOneOrTwoOptimizer,
    ZeroThreeOptimizer,
    ZeroThreeParameter,
)
from ortlaunch.worker.model.named_state import (
    LossScale,
    NamedNumbers,
    NamedState,
    ParameterRange,
    persistent_buffers_by_name,
    trained_parameter_shapes,
    whole_parameter_ranges,
)
from ortlaunch.worker.process_group.distributed import DistributedContext

# Attributes of DeepSpeed's dynamic loss scaler.
_COUNTERS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


def named_state_of_deepspeed_engine(
    engine: Any, model: nn.Module, group: DistributedContext
) -> NamedState:
    """Return the state of a DeepSpeed engine around a model.

    Args:
        engine: DeepSpeed's.
        model: the model within it.
        group: all ranks.

    Raises:
        CheckpointError: the type of the optimizer, or the location of its state, is not supported.
    """
    optimizer_class = type(engine.optimizer).__name__
    optimizer = engine.optimizer
    copy_and_count = (group.data_parallel.rank, group.data_parallel.size)
    if isinstance(optimizer, torch.optim.Optimizer):
        named_ranges = whole_parameter_ranges(model.named_parameters(), optimizer)
        return NamedState(
            trained_parameter_shapes(model),
            [*_ranges_in_whole_parameters(named_ranges, model, group)],
            optimizer,
            persistent_buffers_by_name(model),
            copy_and_count,
        )
    if optimizer_class not in _ACCESS_BY_CLASS:
        raise CheckpointError(
            f"checkpoints of DeepSpeed's {optimizer_class} are not supported; change zero.stage or "
            "zero.deepspeed"
        )
    find_ranges, refresh = _ACCESS_BY_CLASS[optimizer_class]
    return NamedState(
        trained_parameter_shapes(model),
        [*_ranges_in_whole_parameters(find_ranges(optimizer, model, group.rank), model, group)],
        optimizer.optimizer,
        persistent_buffers_by_name(model),
        copy_and_count=copy_and_count if optimizer_class == "FP16_UnfusedOptimizer" else (0, 1),
        loss_scale=_dynamic_loss_scale_access_or_none(optimizer),
        refresh=lambda: refresh(optimizer),
    )


def _ranges_in_whole_parameters(
    ranges: Iterable[ParameterRange], model: nn.Module, group: DistributedContext
) -> Iterator[ParameterRange]:
    """Yield ranges of whole parameters in place of ranges of this rank's slices of them."""
    tensor_index = group.rank % group.mesh.tensor if group.mesh else 0
    parameter_by_name = dict(model.named_parameters())
    for parameter_range in ranges:
        tensor_slice = slice_of_autotp_rank(parameter_by_name[parameter_range.name], tensor_index)
        if tensor_slice is None:
            # The other ranks of the tensor group have it, too.
            yield replace(parameter_range, is_saved=tensor_index == 0)
        else:
            yield replace(
                parameter_range,
                start=tensor_slice.first + parameter_range.start,
                runs=tensor_slice.runs,
            )


def _ranges_of_fp32_copies_without_zero(
    optimizer: UnshardedMasterWeights, model: nn.Module, rank: int
) -> list[ParameterRange]:
    """Return the parts without ZeRO in fp16 or bf16: one float32 copy of each parameter."""
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups)
    masters = {
        weight: master for weights, copies in pairs for weight, master in zip(weights, copies)
    }
    return whole_parameter_ranges(model.named_parameters(), optimizer.optimizer, masters)


def _copy_masters_into_weights(optimizer: UnshardedMasterWeights) -> None:
    # Restored master weights must be copied into the model, which the next forward pass reads.
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups):
        for weight, master in zip(weights, masters):
            weight.data.copy_(master.data)


def _ranges_in_zero_1_and_2(
    optimizer: ZeroOneOrTwoOptimizer, model: nn.Module, rank: int
) -> Iterator[ParameterRange]:
    """Yield this rank's pieces of parameters in ZeRO 1 and 2: ranges of one flat tensor a group."""
    for name, parameter in model.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        # None: the parameter is frozen, or this rank has no piece of it.
        if mapping is not None:
            model_fragment = mapping.lp_fragment_address
            group = optimizer.optimizer.param_groups[mapping.param_group_index]
            yield ParameterRange(
                name,
                model_fragment.start,
                model_fragment.numel,
                group["params"][0],
                mapping.hp_fragment_address.start,
                group,
            )


def _ranges_in_zero_3(
    optimizer: ZeroThreeOptimizer, model: nn.Module, rank: int
) -> Iterator[ParameterRange]:
    """Yield this rank's pieces of parameters in ZeRO 3.

    Each parameter is cut into equal pieces, stored in flat tensors; the last pieces are padded.
    """
    for name, parameter in model.named_parameters():
        partitioned = cast(ZeroThreeParameter, parameter)
        # DeepSpeed leaves out what has no elements.
        if not parameter.requires_grad or not partitioned.ds_numel:
            continue
        flat, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        master = optimizer.fp32_partitioned_groups_flat[flat]
        if size != partitioned.partition_numel() or master.numel() < offset + size:
            raise CheckpointError(
                f"DeepSpeed keeps {name} where it cannot be saved from (a swapped or nested "
                "partition)"
            )
        # Without the padding; a rank may have padding alone.
        count = min(size, partitioned.ds_numel - rank * size)
        if count > 0:
            group = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[flat]]
            yield ParameterRange(name, rank * size, count, master, offset, group)


def _copy_zero_3_partitions_into_weights(optimizer: ZeroThreeOptimizer) -> None:
    optimizer._partition_all_parameters()
    for flat in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(flat)
    # Persistent parameters are not partitioned: every rank needs all of each.
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


_StateAccess = tuple[
    Callable[[Any, nn.Module, int], Iterable[ParameterRange]], Callable[[Any], None]
]
_ACCESS_BY_CLASS: dict[str, _StateAccess] = {
    "FP16_UnfusedOptimizer": (_ranges_of_fp32_copies_without_zero, _copy_masters_into_weights),
    "DeepSpeedZeroOptimizer": (
        _ranges_in_zero_1_and_2,
        lambda optimizer: optimizer.update_lp_params(),
    ),
    "BF16_Optimizer": (_ranges_in_zero_1_and_2, lambda optimizer: optimizer.update_lp_params()),
    "DeepSpeedZeroOptimizer_Stage3": (_ranges_in_zero_3, _copy_zero_3_partitions_into_weights),
}


def _dynamic_loss_scale_access_or_none(optimizer: object) -> LossScale | None:
    """Return access to a dynamic loss scale; None for a fixed one, which the recipe sets."""
    # The attribute's name differs between DeepSpeed's optimizers.
    scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))
    is_dynamic = getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))
    if scaler is None or not is_dynamic:
        return None
    return LossScale(
        lambda: {
            "scale": scaler.cur_scale,
            **{name: getattr(scaler, name) for name in _COUNTERS if hasattr(scaler, name)},
        },
        lambda numbers: _write_loss_scale(scaler, numbers),
    )


def _write_loss_scale(scaler: Any, numbers: NamedNumbers) -> None:
    scaler.cur_scale = numbers["scale"]
    for name in _COUNTERS:
        if name in numbers:
            setattr(scaler, name, int(numbers[name]))

"""Memory of a run beside its steady state on the devices: at the start, on the host, in files."""

from __future__ import annotations

from ortlaunch.launch_plan import HostMemory
from ortlaunch.recipe import Recipe

_MASTER_BYTES = _GRADIENT_BYTES = 4  # float32


def state_bytes_per_parameter(recipe: Recipe) -> int:
    """Return the bytes of optimizer state for each trained parameter."""
    return int(4 * (recipe.optimizer.traits.moments or bool(recipe.optimizer.momentum)))


def peak_device_bytes_before_first_step(
    recipe: Recipe, tensor_sizes: list[int], trainable_count: int, value_bytes: int, rank_count: int
) -> int:
    """Return the most bytes on a device while the model is moved there and sharded.

    At that time the optimizer has no state yet. DeepSpeed 0.19 copies trained weights into a flat
    tensor in stages 1 and 2, on the device if both fit, else in the host's memory. Stage 3 shards
    one tensor after another; it and stage 0 make float32 copies and gradients. FSDP2 shards one
    layer after another, and counts as stage 3; `rank_count` is then the ranks that share a copy.
    """
    stage = recipe.zero.stage if recipe.zero else 3 if recipe.parallel else None
    if stage == 3:
        # A layer of FSDP2 moves to the device, and its parts back to the host.
        if recipe.parallel and recipe.parallel.offload:
            return value_bytes * max(tensor_sizes)
        is_offloaded = (
            recipe.zero is not None
            and recipe.zero.offload is not None
            and recipe.zero.offload.optimizer
        )
        copy_bytes = (
            0
            if is_offloaded
            else (_MASTER_BYTES + _GRADIENT_BYTES) * -(-trainable_count // rank_count)
        )
        return value_bytes * -(-sum(tensor_sizes) // rank_count) + max(
            value_bytes * max(tensor_sizes), copy_bytes
        )
    copy_bytes = value_bytes + _MASTER_BYTES + _GRADIENT_BYTES if value_bytes < _MASTER_BYTES else 0
    # Bytes for each trained parameter, beside the model.
    extra_bytes_per_parameter = {None: 0, 0: copy_bytes, 1: value_bytes, 2: value_bytes}[stage]
    return value_bytes * sum(tensor_sizes) + extra_bytes_per_parameter * trainable_count


def planned_load_snapshot_and_offload_bytes_of_rank(
    recipe: Recipe,
    parameter_count: int,
    trainable_count: int,
    value_bytes: int,
    rank_count: int,
    device: str,
) -> HostMemory:
    """Return the bytes that each rank uses of its host's memory.

    Args:
        parameter_count: number of parameters of the model, frozen ones included.
        value_bytes: bytes of a weight in training.
    """
    state_value_bytes = state_bytes_per_parameter(recipe)
    parameters_per_rank = -(-trainable_count // rank_count)
    async_setting = getattr(recipe.checkpoint, "async")
    # By default, saves run beside training on GPUs only (checkpoint.async).
    snapshot_bytes = (
        (_MASTER_BYTES + state_value_bytes) * parameters_per_rank
        if (device == "cuda" if async_setting is None else async_setting)
        else 0
    )
    offload = (
        # On a CPU an offload moves nothing.
        recipe.zero.offload if recipe.zero and device == "cuda" else None
    )
    bytes_by_target = {"cpu": 0, "nvme": 0}
    if offload and offload.optimizer:
        bytes_by_target[offload.optimizer] += (
            _MASTER_BYTES + state_value_bytes + _GRADIENT_BYTES
        ) * parameters_per_rank
        # In the weights' precision: new weights on their way back, gradients of earlier passes; in
        # stage 3 gradients.
        copy_count = (
            2
            if recipe.zero and recipe.zero.stage < 3 and recipe.batch.accumulation_steps != 1
            else 1
        )
        bytes_by_target["cpu"] += copy_count * value_bytes * parameters_per_rank
    if offload and offload.parameters:
        bytes_by_target[offload.parameters] += -(-value_bytes * parameter_count // rank_count)
    return HostMemory(
        4 * parameter_count,
        bytes_by_target["cpu"],
        snapshot_bytes,
        bytes_by_target["nvme"],
        is_built_on_rank_0_only=recipe.has_fsdp2 and not recipe.model.is_built_of_values,
    )

"""Memory of a run beside its steady state on the devices: at the start, on the host, in files."""

from __future__ import annotations

from ortlaunch.launch_plan import HostMemory
from ortlaunch.recipe import Recipe

_MASTER = _GRADIENT = 4  # float32


def state_bytes(recipe: Recipe) -> int:
    """Return the bytes of optimizer state for each trained parameter."""
    return int(4 * (recipe.optimizer.traits.moments or bool(recipe.optimizer.momentum)))


def at_start(recipe: Recipe, tensors: list[int], trainable: int, width: int, ranks: int) -> int:
    """Return the most bytes on a device while the model is moved there and sharded.

    At that time the optimizer has no state yet. DeepSpeed 0.19 copies trained weights into a flat
    tensor in stages 1 and 2, on the device if both fit, else in the host's memory. Stage 3 shards
    one tensor after another; it and stage 0 make float32 copies and gradients.
    """
    stage = recipe.zero.stage if recipe.zero else None
    if stage == 3:
        offloaded = (
            recipe.zero is not None
            and recipe.zero.offload is not None
            and recipe.zero.offload.optimizer
        )
        copies = 0 if offloaded else (_MASTER + _GRADIENT) * -(-trainable // ranks)
        return width * -(-sum(tensors) // ranks) + max(width * max(tensors), copies)
    copies = width + _MASTER + _GRADIENT if width < _MASTER else 0
    # Bytes for each trained parameter, beside the model.
    beside = {None: 0, 0: copies, 1: width, 2: width}[stage]
    return width * sum(tensors) + beside * trainable


def on_host(
    recipe: Recipe, parameters: int, trainable: int, width: int, ranks: int, device: str
) -> HostMemory:
    """Return the bytes that each rank uses of its host's memory.

    Args:
        parameters: number of parameters of the model, frozen ones included.
        width: bytes of a weight in training.
    """
    state = state_bytes(recipe)
    share = -(-trainable // ranks)
    beside = getattr(recipe.checkpoint, "async")
    # By default, saves run beside training on GPUs only (checkpoint.async).
    snapshot = (_MASTER + state) * share if (device == "cuda" if beside is None else beside) else 0
    offload = (
        # On a CPU an offload moves nothing.
        recipe.zero.offload if recipe.zero and device == "cuda" else None
    )
    moved = {"cpu": 0, "nvme": 0}
    if offload and offload.optimizer:
        moved[offload.optimizer] += (_MASTER + state + _GRADIENT) * share
        # In the weights' precision: new weights on their way back, gradients of earlier passes; in
        # stage 3 gradients.
        copies = (
            2
            if recipe.zero and recipe.zero.stage < 3 and recipe.batch.accumulation_steps != 1
            else 1
        )
        moved["cpu"] += copies * width * share
    if offload and offload.parameters:
        moved[offload.parameters] += -(-width * parameters // ranks)
    return HostMemory(4 * parameters, moved["cpu"], snapshot, moved["nvme"])

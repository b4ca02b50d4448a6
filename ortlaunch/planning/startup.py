"""Memory of a run beside its steady state on the devices: at the start, on the host, and in files of an offload."""

from __future__ import annotations

from ortlaunch.plan import HostMemory
from ortlaunch.recipe import Recipe

_MASTER = _GRADIENT = 4  # float32


def state_bytes(recipe: Recipe) -> int:
    """Bytes of optimizer state a trained parameter."""
    return 4 * (recipe.optimizer.traits.moments or bool(recipe.optimizer.momentum))


def at_start(recipe: Recipe, tensors: list[int], trainable: int, width: int, ranks: int) -> int:
    """Most bytes on a device while the model is put there and sharded, before the optimizer has state.

    DeepSpeed 0.19 copies trained weights into a flat tensor in stages 1 and 2, on the device where that has room for
    both; else in the host's memory. Stage 3 shards one tensor after another; it and stage 0 make float32 copies and
    gradients.
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
    beside = {None: 0, 0: copies, 1: width, 2: width}[stage]
    return width * sum(tensors) + beside * trainable


def on_host(
    recipe: Recipe, parameters: int, trainable: int, width: int, ranks: int, device: str
) -> HostMemory:
    """Bytes that each rank takes of its host's memory.

    Args:
        parameters: of the model, frozen ones included.
        width: bytes of a weight in training.
    """
    state = state_bytes(recipe)
    share = -(-trainable // ranks)
    beside = getattr(recipe.checkpoint, "async")
    snapshot = (_MASTER + state) * share if (device == "cuda" if beside is None else beside) else 0
    offload = (
        recipe.zero.offload if recipe.zero and device == "cuda" else None
    )  # on a CPU it moves nothing
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

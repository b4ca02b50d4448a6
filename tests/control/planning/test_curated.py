"""Plans of recipes/models on GPUs of 80 GB."""

from __future__ import annotations

import pytest

from ortlaunch.planning.memory import estimate
from ortlaunch.recipe import load
from ortlaunch.resolve import shipped

GPU = 80e9
DECODERS = [
    name
    for name in shipped.names()
    if name.startswith("models/") and load(shipped.find(name)).recipe.model.config
]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", DECODERS)
def test_a_curated_model_fits(name: str, ranks: int) -> None:
    """All fit 8 x 80 GB and, with adapters or the optimizer in host memory, one GPU of 80 GB."""
    offloads = () if ranks == 8 or name.endswith("-lora") else ("zero.offload.optimizer=cpu",)
    recipe = load(shipped.find(name), offloads).recipe
    memory = estimate(recipe, int(recipe.batch.micro_size or 1), ranks, "cuda")
    assert memory is not None
    assert dict(memory.by_stage)[memory.chosen].total + memory.compared < GPU

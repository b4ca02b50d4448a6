"""Plans of recipes/models on GPUs of 80 GB."""

from __future__ import annotations

import pytest

from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe import load_recipe
from ortlaunch.resolve import shipped

GPU = 80e9
# On one GPU, all weights of these need the optimizer in host memory.
LARGE = ("models/llama3-8b", "models/mistral-7b", "models/phi4-mini", "models/qwen3-8b")
NAMES = [name for name in shipped.shipped_recipe_names() if name.startswith("models/")]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_curated_model_fits(name: str, ranks: int) -> None:
    """All fit 8 x 80 GB and, with adapters or the optimizer in host memory, one GPU of 80 GB."""
    offloads = ("zero.offload.optimizer=cpu",) if ranks == 1 and name in LARGE else ()
    recipe = load_recipe(shipped.shipped_recipe_path_or_refuse(name), offloads).recipe
    memory = estimate_rank_memory_or_none(recipe, int(recipe.batch.micro_size or 1), ranks, "cuda")
    assert memory is not None
    assert dict(memory.by_stage)[memory.chosen].total < GPU

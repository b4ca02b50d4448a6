"""Plans of recipes/models on GPUs of 80 GB."""

from __future__ import annotations

import pytest

import ortlaunch
from ortlaunch.launch_plan import Mesh
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe import load_recipe
from ortlaunch.resolve import shipped

GPU = 80e9
# On one GPU, all weights of these need the optimizer in host memory.
LARGE = ("models/llama3-8b", "models/mistral-7b", "models/phi4-mini", "models/qwen3-8b")
# Several hosts compute it.
LARGEST = "models/llama3-70b"
NAMES = [
    name
    for name in shipped.shipped_recipe_names()
    # T5 has no plan.
    if name.startswith("models/") and name not in (LARGEST, "models/t5-small-summary")
]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_curated_model_fits(name: str, ranks: int) -> None:
    """All fit 8 x 80 GB and, with adapters or the optimizer in host memory, one GPU of 80 GB."""
    offloads = ("zero.offload.optimizer=cpu",) if ranks == 1 and name in LARGE else ()
    recipe = load_recipe(shipped.shipped_recipe_path_or_refuse(name), offloads).recipe
    memory = estimate_rank_memory_or_none(recipe, int(recipe.batch.micro_size or 1), ranks, "cuda")
    assert memory is not None
    assert dict(memory.by_stage)[memory.chosen].total < GPU


def test_70b_fits_the_hosts_that_it_names() -> None:
    """Its 4 x 8 GPUs hold it, the GPUs of a host compute a layer together, and half of them do not."""
    plan = ortlaunch.plan(LARGEST, "launch.device=cuda")
    assert (plan.world_size, plan.mesh) == (32, Mesh(1, 4, 8))
    assert plan.memory is not None
    assert plan.memory.parameters == 70_553_706_496
    assert dict(plan.memory.by_stage)["FSDP2"].total < 0.9 * GPU
    found = ortlaunch.fitting_worlds(LARGEST, gpu="80GiB")
    assert {world.sharding: world.gpus for world in found.worlds} == {
        **dict.fromkeys(("DDP", "ZeRO 1", "ZeRO 2", "HSDP")),
        **dict.fromkeys(("ZeRO 3", "FSDP2"), 32),
        **{f"FSDP2, tensor {count}": 32 for count in (2, 4, 8)},
        "ZeRO 1, tensor 2": None,
        "ZeRO 1, tensor 4": None,
        "ZeRO 1, tensor 8": 64,
    }


@pytest.mark.parametrize(
    ("name", "gibibytes", "gpus"),
    [(name, *size) for name in ("fsdp", "fsdp-tp") for size in ((80, 2), (40, 4), (24, 8))],
)
def test_what_the_recipes_of_fsdp_say_of_gpus(name: str, gibibytes: int, gpus: int) -> None:
    """Their comments name the smallest worlds; fsdp-tp's mesh has pairs."""
    found = ortlaunch.fitting_worlds(f"llama2-7b/{name}", gpu=f"{gibibytes}GiB")
    own = {"fsdp": "FSDP2", "fsdp-tp": "FSDP2, tensor 2"}[name]
    assert {world.gpus for world in found.worlds if world.sharding == own} == {gpus}

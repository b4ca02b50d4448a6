"""Print the bytes of one micro batch of a recipe, for the checkup of /dev/shm."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import parse_resolved_recipe
from ortlaunch.tables.tasks import BatchBytesRequest
from ortlaunch.user_modules import append_factory_folders_to_sys_path


def run(request: BatchBytesRequest) -> None:
    """Read the first micro batch, and print its bytes."""
    recipe = parse_resolved_recipe(request.recipe)
    append_factory_folders_to_sys_path(recipe, Path(request.modules))
    from ortlaunch.worker.data import Batches, LoadedData, collate_function_of_recipe

    micro_samples = request.micro_samples
    data = LoadedData(recipe)
    batches = Batches(
        data.train,
        BatchPlan(micro_samples, micro_samples, 1, 1, None),
        recipe.seed,
        stack=collate_function_of_recipe(recipe),
    )
    print(
        sum(value.nbytes for value in batches.read_micro_batch_and_count_tokens(0, 0, 0).values())
    )

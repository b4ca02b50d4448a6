"""The work of a world's ranks: the solved batch equation, and the memory that it needs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import USUAL_PROCESS, BatchPlan, Memory, ProcessMemory
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.planning.mesh import data_parallel_rank_count, mesh_of_ranks_or_none
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe


class Workload(NamedTuple):
    """The batch, and the memory that it needs."""

    batch: BatchPlan
    memory: Memory | None
    """None for a model that cannot be counted."""
    process: ProcessMemory
    """Bytes of a rank's process beside its model."""


def solve_batch_and_estimate_memory(
    recipe: Recipe,
    world: World,
    process_memory: ProcessMemory = USUAL_PROCESS,
    trains: bool = True,
) -> Workload:
    """Return the workload of a run on these hosts.

    An elastic run keeps its batch, and `parallel` divides its ranks, on every number of hosts that
    it may get.

    Args:
        recipe: the recipe.
        world: hosts and device.
        process_memory: bytes of a rank's process beside its model.
        trains: whether the task of the ranks trains, so that `parallel` divides them.

    Raises:
        PlanError: the batch equation has no whole solution, or `parallel` does not divide the ranks.
    """
    node_counts = recipe.launch.node_counts if recipe.launch.elastic else ()
    for host_count in (node_count for node_count in node_counts if node_count <= len(world.hosts)):
        try:
            nodes = world.nodes[:host_count]
            solve_batch_equation_or_refuse(recipe, data_parallel_rank_count(recipe, nodes, trains))
        except PlanError as error:
            raise PlanError(
                f"launch.nodes is {recipe.launch.nodes}, and on {count_with_noun(host_count, 'host')}: {error}"
            ) from None
    batch = solve_batch_equation_or_refuse(
        recipe, data_parallel_rank_count(recipe, world.nodes, trains)
    )
    mesh = mesh_of_ranks_or_none(recipe, world.nodes, trains)
    planned_memory = estimate_rank_memory_or_none(
        recipe,
        batch.micro_samples,
        world.rank_count,
        world.device,
        process_memory,
        mesh.ranks_of_copy if mesh else None,
    )
    return Workload(batch, planned_memory, process_memory)


def solve_batch_equation_or_refuse(recipe: Recipe, rank_count: int) -> BatchPlan:
    """Solve global = micro x accumulation x ranks for the value that the recipe leaves out."""
    global_size = recipe.batch.global_size
    micro_size = recipe.batch.micro_size
    accumulation_steps = recipe.batch.accumulation_steps
    if micro_size == "auto":
        # Replaced when the rank has found the largest size that fits (micro_size.py).
        micro_size = 1
    if global_size is None:
        micro_size = micro_size or 1
        accumulation_steps = accumulation_steps or 1
        global_size = micro_size * accumulation_steps * rank_count
    elif micro_size is None:
        accumulation_steps = accumulation_steps or 1
        micro_size = _divide_global_size_or_refuse(
            global_size,
            accumulation_steps * rank_count,
            f"accumulation_steps ({accumulation_steps}) x {count_with_noun(rank_count, 'rank')}",
        )
    elif accumulation_steps is None:
        accumulation_steps = _divide_global_size_or_refuse(
            global_size,
            micro_size * rank_count,
            f"micro_size ({micro_size}) x {count_with_noun(rank_count, 'rank')}",
        )
    if global_size != micro_size * accumulation_steps * rank_count:
        raise PlanError(
            f"batch: global_size ({global_size}) != micro_size ({micro_size}) x accumulation_steps "
            f"({accumulation_steps}) x {count_with_noun(rank_count, 'rank')} = "
            f"{micro_size * accumulation_steps * rank_count}; omit one of the "
            f"three, or run on {global_size / (micro_size * accumulation_steps):g} ranks"
        )
    sequence_length = (
        # With samples of several lengths, the tokens of a step are not known in advance.
        None if recipe.data.padding_bucket_or_multiple_of_8_lengths else recipe.data.sequence_length
    )
    return BatchPlan(
        global_size,
        micro_size,
        accumulation_steps,
        rank_count,
        global_size * sequence_length if sequence_length else None,
    )


def _divide_global_size_or_refuse(global_size: int, divisor_samples: int, divisor_text: str) -> int:
    """Return total / unit; raise PlanError if it is not whole."""
    if global_size % divisor_samples:
        lower_multiple = global_size // divisor_samples * divisor_samples
        upper_multiple = (global_size // divisor_samples + 1) * divisor_samples
        nearest_text = (
            f"{lower_multiple} or {upper_multiple}" if lower_multiple else str(upper_multiple)
        )
        raise PlanError(
            f"batch: global_size ({global_size}) is not a multiple of {divisor_text} = {divisor_samples}; "
            f"{nearest_text} would be valid"
        )
    return global_size // divisor_samples

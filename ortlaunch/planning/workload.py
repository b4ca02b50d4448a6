"""The work of a world's ranks: the solved batch equation, and the memory that it needs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.errors import PlanError
from ortlaunch.launch_plan import USUAL_PROCESS, BatchPlan, Memory, ProcessMemory
from ortlaunch.planning.memory import estimate
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.units import count_with_noun


class Workload(NamedTuple):
    """The batch, and the memory that it needs."""

    batch: BatchPlan
    memory: Memory | None
    """None for a model that cannot be counted."""
    process: ProcessMemory
    """Bytes of a rank's process beside its model."""


def workload(recipe: Recipe, world: World, process: ProcessMemory = USUAL_PROCESS) -> Workload:
    """Return the workload of a run on these hosts.

    An elastic run keeps its batch on every number of hosts that it may get.

    Args:
        recipe: the recipe.
        world: hosts and device.
        process: bytes of a rank's process beside its model.

    Raises:
        PlanError: the batch equation has no whole solution.
    """
    counts = recipe.launch.node_counts if recipe.launch.elastic else ()
    for count in (each for each in counts if each <= len(world.hosts)):
        try:
            solve_batch(recipe, count * world.hosts[0].slots)
        except PlanError as error:
            raise PlanError(
                f"launch.nodes is {recipe.launch.nodes}, and on {count_with_noun(count, 'host')}: {error}"
            ) from None
    batch = solve_batch(recipe, world.ranks)
    memory = estimate(recipe, batch.micro_samples, world.ranks, world.device, process)
    return Workload(batch, memory, process)


def solve_batch(recipe: Recipe, ranks: int) -> BatchPlan:
    """Solve global = micro x accumulation x ranks for the value that the recipe leaves out."""
    total = recipe.batch.global_size
    micro = recipe.batch.micro_size
    steps = recipe.batch.accumulation_steps
    if micro == "auto":
        # Replaced when the rank has found the largest size that fits (micro_size.py).
        micro = 1
    if total is None:
        micro = micro or 1
        steps = steps or 1
        total = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = _divided(
            total, steps * ranks, f"accumulation_steps ({steps}) x {count_with_noun(ranks, 'rank')}"
        )
    elif steps is None:
        steps = _divided(
            total, micro * ranks, f"micro_size ({micro}) x {count_with_noun(ranks, 'rank')}"
        )
    if total != micro * steps * ranks:
        raise PlanError(
            f"batch: global_size ({total}) != micro_size ({micro}) x accumulation_steps "
            f"({steps}) x {count_with_noun(ranks, 'rank')} = {micro * steps * ranks}; omit one of the "
            f"three, or run on {total / (micro * steps):g} ranks"
        )
    length = (
        # With samples of several lengths, the tokens of a step are not known in advance.
        None if recipe.data.lengths else recipe.data.sequence_length
    )
    return BatchPlan(total, micro, steps, ranks, total * length if length else None)


def _divided(total: int, unit: int, shown: str) -> int:
    """Return total / unit; raise PlanError if it is not whole."""
    if total % unit:
        below = total // unit * unit
        above = (total // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        raise PlanError(
            f"batch: global_size ({total}) is not a multiple of {shown} = {unit}; {near} would be valid"
        )
    return total // unit

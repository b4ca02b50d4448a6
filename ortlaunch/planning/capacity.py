"""The least resources of the planned ranks of this host, against its cores and memory."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.errors import PlanError
from ortlaunch.launch_plan import Memory, Node, ProcessMemory
from ortlaunch.machine import smallest_memory_limit, usable_core_count
from ortlaunch.planning.workload import Workload
from ortlaunch.planning.world import World
from ortlaunch.units import count_with_noun, human_bytes


def crowded(world: World, work: Workload, planned_only: bool) -> Iterator[str]:
    """Yield notes on too many ranks for this host's cores, or, by the estimate, for its memory.

    Args:
        planned_only: the plan is only shown, not run: that its model does not fit is a note.

    Raises:
        PlanError: the ranks need more memory than there is, by the exact part of the plan.
    """
    for node in world.nodes:
        if not node.is_here:
            continue
        if world.device == "cpu" and node.slots > usable_core_count():
            yield f"{node.host}: {node.slots} ranks share {usable_core_count()} cores, which slows them"
        yield from _memory(node, work.process, _rank(work.memory, world.device), planned_only)


def _rank(memory: Memory | None, device: str) -> tuple[int, int, str]:
    """Return the host memory of a rank beside its process.

    Returns:
        The least bytes, the likely bytes, and a phrase for their content.
    """
    if memory is None:
        return 0, 0, "of weights, gradients and optimizer state"
    parts = dict(memory.by_stage)[memory.chosen]
    host = memory.host
    kept = host.offloaded + host.snapshot
    likely = host.offloaded + host.snapshot
    if device == "cpu":
        kept, likely = kept + parts.model, kept + parts.total
    # The model is built in float32 before it is cast or sharded; the larger of the two counts.
    if kept < host.built:
        return host.built, max(host.built, likely), "to build the model in float32"
    beside = " and a save beside training (checkpoint.async)" if host.snapshot else ""
    of = "of weights, gradients and optimizer state" if device == "cpu" else "of what is offloaded"
    return kept, likely, of + beside


def _memory(
    node: Node, process: ProcessMemory, rank: tuple[int, int, str], planned_only: bool
) -> Iterator[str]:
    """Yield a note if the ranks of a host do not fit into its memory; raise PlanError for a run."""
    where, most, _ = smallest_memory_limit()
    model, estimated, of = rank
    # The kernel can drop pages of files, so that only private bytes are needed at least.
    least = node.slots * (process.own + model)
    likely = process.bytes_of_ranks(node.slots) + node.slots * estimated
    if least > most:
        each = f"({human_bytes(process.own)} a process + {human_bytes(model)} {of})"
        text = (
            f"{node.host}: {count_with_noun(node.slots, 'rank')} x {each} = {human_bytes(least)} "
            f"at least, and {where} is "
            f"{human_bytes(most)}; use fewer ranks, a smaller model or more hosts"
        )
        # Where not even the processes fit, a plan is refused too.
        if not planned_only or node.slots * process.own > most:
            raise PlanError(text)
        yield text
    elif likely > most:
        yield (
            f"{node.host}: its ranks need about {human_bytes(likely)}, and {where} is {human_bytes(most)}"
        )

"""The least resources of the planned ranks of this host, against its cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ortlaunch.base.errors import PlanError
from ortlaunch.base.machine import smallest_memory_limit, usable_core_count
from ortlaunch.base.units import count_with_noun, human_bytes
from ortlaunch.launch_plan import Memory, Node, ProcessMemory
from ortlaunch.planning.workload import Workload
from ortlaunch.planning.world import World


class HostModelBytes(NamedTuple):
    """Bytes of host memory of a rank beside its process."""

    least: int
    likely: int
    content_text: str
    """Their content, for messages."""


def notes_or_refusal_for_crowding_of_this_host(
    world: World, workload: Workload, is_planned_only: bool
) -> Iterator[str]:
    """Yield notes on too many ranks for this host's cores, or, by the estimate, for its memory.

    Args:
        is_planned_only: the plan is only shown, not run: that its model does not fit is a note.

    Raises:
        PlanError: the ranks need more memory than there is, by the exact part of the plan.
    """
    for node in world.nodes:
        if not node.is_here:
            continue
        if world.device == "cpu" and node.slots > usable_core_count():
            yield f"{node.host}: {node.slots} ranks share {usable_core_count()} cores, which slows them"
        yield from _memory_notes_or_refusal_for_host(
            node,
            workload.process,
            _host_model_bytes(workload.memory, world.device),
            is_planned_only,
        )


def _host_model_bytes(memory: Memory | None, device: str) -> HostModelBytes:
    if memory is None:
        return HostModelBytes(0, 0, "of weights, gradients and optimizer state")
    stage_bytes = dict(memory.by_stage)[memory.chosen]
    host_memory = memory.host
    least_bytes = host_memory.offloaded + host_memory.snapshot
    likely_bytes = host_memory.offloaded + host_memory.snapshot
    if device == "cpu":
        least_bytes, likely_bytes = least_bytes + stage_bytes.model, least_bytes + stage_bytes.total
    # The model is built in float32 before it is cast or sharded; the larger of the two counts.
    if least_bytes < host_memory.built and not host_memory.is_built_on_rank_0_only:
        return HostModelBytes(
            host_memory.built,
            max(host_memory.built, likely_bytes),
            "to build the model in float32",
        )
    save_text = " and a save beside training (checkpoint.async)" if host_memory.snapshot else ""
    content_text = (
        "of weights, gradients and optimizer state" if device == "cpu" else "of what is offloaded"
    )
    return HostModelBytes(least_bytes, likely_bytes, content_text + save_text)


def _memory_notes_or_refusal_for_host(
    host_node: Node,
    process_memory: ProcessMemory,
    model_bytes: HostModelBytes,
    is_planned_only: bool,
) -> Iterator[str]:
    """Yield a note if the ranks of a host do not fit into its memory; raise PlanError for a run."""
    limit_name, limit_bytes, _ = smallest_memory_limit()
    # The kernel can drop pages of files, so that only private bytes are needed at least. Where FSDP2
    # divides the model, rank 0's whole weights lie in files, as far as memory has no room.
    least_bytes = host_node.slots * (process_memory.own + model_bytes.least)
    likely_bytes = (
        process_memory.bytes_of_ranks(host_node.slots) + host_node.slots * model_bytes.likely
    )
    if least_bytes > limit_bytes:
        rank_bytes_text = (
            f"({human_bytes(process_memory.own)} a process + "
            f"{human_bytes(model_bytes.least)} {model_bytes.content_text})"
        )
        message = (
            f"{host_node.host}: {count_with_noun(host_node.slots, 'rank')} x {rank_bytes_text} = "
            f"{human_bytes(least_bytes)} "
            f"at least, and {limit_name} is "
            f"{human_bytes(limit_bytes)}; use fewer ranks, a smaller model or more hosts"
        )
        # Where not even the processes fit, a plan is refused too.
        if not is_planned_only or host_node.slots * process_memory.own > limit_bytes:
            raise PlanError(message)
        yield message
    elif likely_bytes > limit_bytes:
        yield (
            f"{host_node.host}: its ranks need about {human_bytes(likely_bytes)}, and {limit_name} is "
            f"{human_bytes(limit_bytes)}"
        )

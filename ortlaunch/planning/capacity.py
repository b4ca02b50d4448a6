"""What the planned ranks of this host take at least, against the cores and the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.errors import PlanError
from ortlaunch.machine import cores, tightest_limit
from ortlaunch.plan import PROCESS, Bytes, Node, Plan
from ortlaunch.planning.world import is_this_host
from ortlaunch.units import human


def crowded(plan: Plan, planned_only: bool) -> Iterator[str]:
    """Notes on too many ranks for this host's cores, or its memory by the plan's estimate.

    Args:
        planned_only: the plan is looked at, not run: that its model does not fit is a note.

    Raises:
        PlanError: they take more memory than there is, by what is exact in the plan.
    """
    for node in plan.nodes:
        if not is_this_host(node.host):
            continue
        if plan.device == "cpu" and node.slots > cores():
            yield f"{node.host}: {node.slots} ranks share {cores()} cores, and wait for each other"
        yield from _memory(node, _model(plan), planned_only)


def _model(plan: Plan) -> Bytes:
    """What a rank takes of the host's memory for the model; on CUDA that lies on the GPU."""
    if plan.memory is None or plan.device != "cpu":
        return Bytes(0, 0, 0, 0)
    return dict(plan.memory.by_stage)[plan.memory.chosen]


def _memory(node: Node, model: Bytes, planned_only: bool) -> Iterator[str]:
    where, most, _ = tightest_limit()
    least, likely = (node.slots * (PROCESS + each) for each in (model.model, model.total))
    if least > most:
        each = f"({human(PROCESS)} a process + {human(model.model)} of weights, gradients and optimizer state)"
        text = (
            f"{node.host}: {node.slots} ranks x {each} = {human(least)} at least, and {where} is {human(most)}; "
            "ask for fewer ranks, a smaller model or more hosts"
        )
        if not planned_only or node.slots * PROCESS > most:
            raise PlanError(text)
        yield text
    elif likely > most:
        yield f"{node.host}: by the estimate its ranks take {human(likely)}, and {where} is {human(most)}"

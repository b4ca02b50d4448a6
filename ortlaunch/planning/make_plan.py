"""Recipe, world and workload -> Plan: the command that starts the ranks, and their settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ortlaunch.launch_plan import Plan
from ortlaunch.launchers import rendezvous_text
from ortlaunch.planning.deepspeed_config import deepspeed_config
from ortlaunch.planning.memory import estimate
from ortlaunch.planning.workload import Workload, solve_batch
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe


def make_plan(
    recipe: Recipe,
    world: World,
    work: Workload,
    *,
    task: str = "train",
    modules: str,
    worker: Sequence[str],
) -> Plan:
    """Plan a run, once all choices are made.

    Args:
        recipe: a valid recipe.
        world: its hosts in rank order, every slot of which becomes a rank; launcher and device.
        work: the batch for these ranks, and its memory.
        task: the work of the ranks, by its name in `worker/tasks/`.
        modules: folder of the recipe, which may contain the user's own modules.
        worker: the command of one rank.
    """
    batch = work.batch
    return Plan(
        name=recipe.name,
        task=task,
        launcher=world.launcher,
        device=world.device,
        nodes=world.nodes,
        batch=batch,
        threads=world.threads,
        rendezvous=rendezvous_text(world.launcher, len(world.hosts)),
        modules=modules,
        argv=tuple(worker),
        # The user's own variables come last and win.
        env=tuple(sorted({**_interface(recipe), **recipe.launch.env}.items())),
        forward=world.forward,
        memory=work.memory,
        deepspeed=deepspeed_config(
            recipe, batch.micro_samples, batch.accumulation_steps, world.ranks
        ),
        grace_seconds=recipe.launch.grace_seconds,
        shown=recipe.log.ranks,
    )


def replan(recipe: Recipe, plan: Plan) -> Plan:
    """Return the plan of the same world with another batch.

    Raises:
        PlanError: the batch equation has no whole solution on these ranks.
    """
    batch = solve_batch(recipe, plan.world_size)
    ranks = plan.world_size
    memory = plan.memory and estimate(
        recipe, batch.micro_samples, ranks, plan.device, plan.memory.process
    )
    return replace(
        plan,
        batch=batch,
        memory=memory,
        deepspeed=deepspeed_config(recipe, batch.micro_samples, batch.accumulation_steps, ranks),
    )


def _interface(recipe: Recipe) -> dict[str, str]:
    """Return the variables by which gloo and NCCL select the network interface."""
    name = recipe.launch.interface
    return (
        # For NCCL, `=` means exactly this name; without it, a prefix.
        {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    )

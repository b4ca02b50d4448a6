"""Recipe, world and workload -> Plan: the command that starts the ranks, and their settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ortlaunch.launch_plan import BatchPlan, Mesh, Plan
from ortlaunch.planning.deepspeed_config import deepspeed_config_or_none
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.planning.mesh import mesh_of_ranks_or_none
from ortlaunch.planning.workload import Workload, solve_batch_equation_or_refuse
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.tables.launchers import rendezvous_text
from ortlaunch.tables.tasks import TASKS


def make_plan(
    recipe: Recipe,
    world: World,
    workload: Workload,
    *,
    task_name: str = "train",
    modules_folder: str,
    worker_argv: Sequence[str],
) -> Plan:
    """Plan a run, once all choices are made.

    Args:
        recipe: a valid recipe.
        world: its hosts in rank order, every slot of which becomes a rank; launcher and device.
        workload: the batch for these ranks, and its memory.
        task_name: the work of the ranks, by its name in `worker/tasks/`.
        modules_folder: folder of the recipe, which may contain the user's own modules.
        worker_argv: the command of one rank.
    """
    batch = workload.batch
    mesh = mesh_of_ranks_or_none(recipe, world.nodes, not TASKS[task_name].evaluates)
    return Plan(
        name=recipe.name,
        task=task_name,
        launcher=world.launcher,
        device=world.device,
        nodes=world.nodes,
        batch=batch,
        threads=world.threads,
        rendezvous=rendezvous_text(world.launcher, len(world.hosts)),
        modules=modules_folder,
        argv=tuple(worker_argv),
        # The user's own variables come last and win.
        env=tuple(
            sorted(
                {
                    **{name: str(value) for name, value in recipe.engine.ort_variables.items()},
                    **_network_interface_variables(recipe),
                    **recipe.launch.env,
                }.items()
            )
        ),
        forward=world.forward,
        memory=workload.memory,
        deepspeed=_deepspeed_config_of_batch_or_none(recipe, batch, mesh),
        mesh=mesh,
        grace_seconds=recipe.launch.grace_seconds,
        shown=recipe.log.ranks,
    )


def plan_with_batch_memory_and_deepspeed_of_recipe(recipe: Recipe, plan: Plan) -> Plan:
    """Return the plan of the same world with another batch.

    Raises:
        PlanError: the batch equation has no whole solution on these ranks.
    """
    batch = solve_batch_equation_or_refuse(recipe, plan.batch.data_parallel_ranks)
    memory = plan.memory and estimate_rank_memory_or_none(
        recipe,
        batch.micro_samples,
        plan.world_size,
        plan.device,
        plan.memory.process,
        plan.mesh.ranks_of_copy if plan.mesh else None,
    )
    return replace(
        plan,
        batch=batch,
        memory=memory,
        deepspeed=_deepspeed_config_of_batch_or_none(recipe, batch, plan.mesh),
    )


def _deepspeed_config_of_batch_or_none(
    recipe: Recipe, batch: BatchPlan, mesh: Mesh | None
) -> dict[str, object] | None:
    return deepspeed_config_or_none(
        recipe,
        batch.micro_samples,
        batch.accumulation_steps,
        batch.data_parallel_ranks,
        mesh.tensor if mesh else 1,
    )


def _network_interface_variables(recipe: Recipe) -> dict[str, str]:
    """Return the variables by which gloo and NCCL select the network interface."""
    interface_name = recipe.launch.interface
    return (
        # For NCCL, `=` means exactly this name; without it, a prefix.
        {"GLOO_SOCKET_IFNAME": interface_name, "NCCL_SOCKET_IFNAME": f"={interface_name}"}
        if interface_name
        else {}
    )

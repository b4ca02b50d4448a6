"""Recipe and hosts -> Plan: ranks on hosts, the batch equation solved, what is forwarded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ortlaunch.errors import PlanError
from ortlaunch.launchers import rendezvous
from ortlaunch.plan import BatchPlan, Node, Plan
from ortlaunch.planning.deepspeed_config import deepspeed_config
from ortlaunch.planning.memory import estimate
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.units import counted

# Variables of the user's shell that every rank gets, by name; their values are never written or shown.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HTTPS_PROXY", "NO_PROXY")
FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "I_MPI_", "MPI4PY_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
    "ORTMODULE_", "ORTLAUNCH_", "TORCH_", "TORCHINDUCTOR_", "DS_", "PYTORCH_", "WANDB_", "MLFLOW_",
    "CUDA_CACHE_", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
)  # fmt: skip


def make_plan(
    recipe: Recipe,
    world: World,
    *,
    task: str = "train",
    modules: str,
    worker: Sequence[str],
    environ: Mapping[str, str],
) -> Plan:
    """Plan a run.

    Args:
        recipe: a valid recipe.
        world: its hosts in rank order, every slot of which becomes a rank; launcher and device.
        task: what the ranks do, as `worker/tasks/` names it.
        modules: folder of the recipe, where the user's own modules may lie.
        worker: the command of one rank.
        environ: the user's environment, of which names are picked for forwarding.

    Raises:
        PlanError: the batch equation has no whole solution on these ranks.
    """
    nodes, first = [], 0
    for host in world.hosts:
        nodes.append(Node(host.name, host.slots, first, host.devices))
        first += host.slots
    _check_fewer_hosts(recipe, world)
    batch = _batch(recipe, first)
    return Plan(
        name=recipe.name,
        task=task,
        launcher=world.launcher,
        device=world.device,
        nodes=tuple(nodes),
        batch=batch,
        threads=world.threads,
        rendezvous=rendezvous(world.launcher, len(nodes)),
        modules=modules,
        argv=tuple(worker),
        env=tuple(sorted({**_interface(recipe), **recipe.launch.env}.items())),
        forward=_forwarded(recipe, world, environ),
        memory=estimate(recipe, batch.micro_samples, first, world.device),
        deepspeed=deepspeed_config(recipe, batch.micro_samples, batch.accumulation_steps, first),
        grace_seconds=recipe.launch.grace_seconds,
        shown=recipe.log.ranks,
    )


def replan(recipe: Recipe, plan: Plan) -> Plan:
    """The same world with another batch.

    Raises:
        PlanError: the batch equation has no whole solution on these ranks.
    """
    batch, ranks = _batch(recipe, plan.world_size), plan.world_size
    return replace(
        plan,
        batch=batch,
        memory=estimate(recipe, batch.micro_samples, ranks, plan.device),
        deepspeed=deepspeed_config(recipe, batch.micro_samples, batch.accumulation_steps, ranks),
    )


def _interface(recipe: Recipe) -> dict[str, str]:
    """What tells gloo and NCCL where to listen."""
    name = recipe.launch.interface
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}  # NCCL: exactly this one


def _forwarded(recipe: Recipe, world: World, environ: Mapping[str, str]) -> tuple[str, ...]:
    named = {name for name in environ if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)}
    absent = [name for name in recipe.launch.forward if name not in environ]
    from_secret = recipe.submit.scheduler == "kubernetes" and world.launcher == "inside" and world.inside is None
    if absent and not from_secret:
        raise PlanError(f"launch.forward: {', '.join(absent)} is not set in this shell; export it, or take it out")
    return tuple(sorted((named | set(recipe.launch.forward)) - set(recipe.launch.env)))


def _check_fewer_hosts(recipe: Recipe, world: World) -> None:
    """An elastic run keeps its global batch on every number of hosts that it may come to."""
    counts = recipe.launch.node_counts if recipe.launch.elastic else ()
    for count in (each for each in counts if each <= len(world.hosts)):
        try:
            _batch(recipe, count * world.hosts[0].slots)
        except PlanError as error:
            raise PlanError(
                f"launch.nodes is {recipe.launch.nodes}, and on {counted(count, 'host')}: {error}"
            ) from None


def _batch(recipe: Recipe, ranks: int) -> BatchPlan:
    """Solve global = micro x accumulation x ranks for the one that the recipe leaves out."""
    total, micro, steps = recipe.batch.global_size, recipe.batch.micro_size, recipe.batch.accumulation_steps
    if micro == "auto":
        micro = 1  # until it is found (micro_size.py)
    if total is None:
        micro, steps = micro or 1, steps or 1
        total = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = _divided(total, steps * ranks, f"accumulation_steps ({steps}) x {counted(ranks, 'rank')}")
    elif steps is None:
        steps = _divided(total, micro * ranks, f"micro_size ({micro}) x {counted(ranks, 'rank')}")
    if total != micro * steps * ranks:
        raise PlanError(
            f"batch: global_size ({total}) != micro_size ({micro}) x accumulation_steps ({steps}) x "
            f"{counted(ranks, 'rank')} = {micro * steps * ranks}; leave one of the three out, "
            f"or run on {total / (micro * steps):g} ranks"
        )
    length = None if recipe.data.lengths else recipe.data.sequence_length  # with those, nobody knows before
    return BatchPlan(total, micro, steps, ranks, total * length if length else None)


def _divided(total: int, unit: int, shown: str) -> int:
    if total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        raise PlanError(f"batch: global_size ({total}) is not a multiple of {shown} = {unit}; {near} would do")
    return total // unit

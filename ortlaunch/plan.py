"""Recipe and hosts -> Plan: who runs where, the batch equation, the worker's command. Pure.

The plan is what the run must be: ranks check the world they find against it before a model is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ortlaunch.errors import PlanError
from ortlaunch.planning.deepspeed_config import deepspeed_config
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.memory import Bytes, Memory, estimate
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe

# Variables of the user's shell that every rank gets, by name; their values are never written or shown.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HTTPS_PROXY", "NO_PROXY")
FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "I_MPI_", "MPI4PY_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
    "ORTMODULE_", "ORTLAUNCH_", "TORCH_", "TORCHINDUCTOR_", "DS_", "CUDA_LAUNCH_BLOCKING", "PYTORCH_",
)  # fmt: skip
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Node(NamedTuple):
    """One host of the run; its ranks are first_rank .. first_rank + slots - 1."""

    host: str
    slots: int
    first_rank: int
    devices: tuple[int, ...]


class BatchPlan(NamedTuple):
    """global_samples == micro_samples x accumulation_steps x data_parallel_ranks; computed here and nowhere else."""

    global_samples: int
    micro_samples: int
    accumulation_steps: int
    data_parallel_ranks: int
    tokens_per_step: int | None


@dataclass(frozen=True)
class Plan:
    """One run, settled. `to_json` and `from_json` are inverse; the same input gives the same text."""

    name: str
    launcher: str
    device: str
    nodes: tuple[Node, ...]
    batch: BatchPlan
    rendezvous: str
    modules: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    forward: tuple[str, ...]
    memory: Memory | None
    deepspeed: dict[str, Any] | None

    @property
    def world_size(self) -> int:
        return self.nodes[-1].first_rank + self.nodes[-1].slots

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank in order, as each must find itself in its environment."""
        world = self.world_size
        return tuple(
            Rank(node.first_rank + local, world, local, node.slots)
            for node in self.nodes
            for local in range(node.slots)
        )

    def node_of(self, rank: int) -> Node:
        """The host that a rank is planned on."""
        return next(node for node in reversed(self.nodes) if node.first_rank <= rank)

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes."""
        return json.dumps({"format": 1, "world_size": self.world_size, **_named(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        value = json.loads(text)
        if value.pop("format") != 1:
            raise PlanError("plan.json was written by another version of ortlaunch")
        value.pop("world_size")
        memory = value["memory"]
        return cls(
            **{
                **value,
                "nodes": tuple(
                    Node(n["host"], n["slots"], n["first_rank"], tuple(n["devices"])) for n in value["nodes"]
                ),
                "batch": BatchPlan(**value["batch"]),
                "argv": tuple(value["argv"]),
                "env": tuple((key, text) for key, text in value["env"].items()),
                "forward": tuple(value["forward"]),
                "memory": memory and _memory_from(memory),
            }
        )


def _named(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, tuples with names as mappings."""
    value = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    value["nodes"] = [node._asdict() for node in plan.nodes]
    value["batch"] = plan.batch._asdict()
    value["env"] = dict(plan.env)
    if plan.memory:
        stages = {stage: {**bytes_._asdict(), "total": bytes_.total} for stage, bytes_ in plan.memory.by_stage}
        value["memory"] = {**plan.memory._asdict(), "by_stage": stages}
    return value


def _memory_from(value: dict[str, Any]) -> Memory:
    stages = tuple(
        (stage, Bytes(**{name: parts[name] for name in Bytes._fields})) for stage, parts in value["by_stage"].items()
    )
    return Memory(**{**value, "by_stage": stages})


def make_plan(
    recipe: Recipe,
    hosts: Sequence[Host],
    *,
    launcher: str,
    device: str,
    modules: str,
    worker: Sequence[str],
    environ: Mapping[str, str],
) -> Plan:
    """Settle a run.

    Args:
        recipe: a valid recipe.
        hosts: in rank order; every slot becomes a rank.
        launcher: `local`, `torchrun`, `mpi` or `inside`.
        device: `cpu` or `cuda`.
        modules: folder of the recipe, where the user's own modules may lie.
        worker: the command of one rank.
        environ: the user's environment, of which names are picked for forwarding.

    Raises:
        PlanError: the batch equation has no whole solution on these ranks.
    """
    nodes, first = [], 0
    for host in hosts:
        nodes.append(Node(host.name, host.slots, first, host.devices))
        first += host.slots
    batch = _batch(recipe, first)
    return Plan(
        name=recipe.name,
        launcher=launcher,
        device=device,
        nodes=tuple(nodes),
        batch=batch,
        rendezvous=_RENDEZVOUS[launcher],
        modules=modules,
        argv=tuple(worker),
        env=tuple(sorted(recipe.launch.env.items())),
        forward=_forwarded(recipe, environ),
        memory=estimate(recipe, batch.micro_samples, first, device),
        deepspeed=deepspeed_config(recipe, batch.micro_samples, batch.accumulation_steps, first),
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


_RENDEZVOUS = {
    "local": "none: one process",
    "torchrun": "a file in the run folder; no port is opened beyond this host",
    "mpi": "on one host a file in the run folder, else a port of rank 0's address, told through MPI",
    "inside": "as the launcher's environment says",
}


def _forwarded(recipe: Recipe, environ: Mapping[str, str]) -> tuple[str, ...]:
    named = {name for name in environ if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)}
    absent = [name for name in recipe.launch.forward if name not in environ]
    if absent:
        raise PlanError(f"launch.forward: {', '.join(absent)} is not set in this shell; export it, or take it out")
    return tuple(sorted((named | set(recipe.launch.forward)) - set(recipe.launch.env)))


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
        micro = _divided(total, steps * ranks, f"accumulation_steps ({steps}) x {ranks} ranks")
    elif steps is None:
        steps = _divided(total, micro * ranks, f"micro_size ({micro}) x {ranks} ranks")
    if total != micro * steps * ranks:
        raise PlanError(
            f"batch: global_size ({total}) != micro_size ({micro}) x accumulation_steps ({steps}) x {ranks} ranks "
            f"= {micro * steps * ranks}; leave one of the three out, or run on {total / (micro * steps):g} ranks"
        )
    length = recipe.data.sequence_length
    return BatchPlan(total, micro, steps, ranks, total * length if length else None)


def _divided(total: int, unit: int, shown: str) -> int:
    if total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        raise PlanError(f"batch: global_size ({total}) is not a multiple of {shown} = {unit}; {near} would do")
    return total // unit


def describe(plan: Plan, recipe: Recipe) -> str:
    """The plan for a person: world, batch, length, memory by ZeRO stage."""
    lines = [*_world_lines(plan), *_start_lines(plan, recipe), *_batch_lines(plan), _length_line(plan, recipe)]
    choice = plan.world_size > 1 or recipe.zero is not None  # else ZeRO has nothing to shard
    return "\n".join([*lines, *(_memory_lines(plan.memory, choice) if plan.memory else [])])


def _world_lines(plan: Plan) -> list[str]:
    shown = plan.nodes if len(plan.nodes) <= 8 else (*plan.nodes[:4], None, *plan.nodes[-2:])
    ranks, hosts = counted(plan.world_size, "rank"), counted(len(plan.nodes), "host")
    lines = [f"{plan.name}: {ranks} on {hosts}, {plan.device}, launcher {plan.launcher}"]
    for node in shown:
        if node is None:
            lines.append(f"  ... {len(plan.nodes) - 6} more hosts")
        else:
            last = node.first_rank + node.slots - 1
            kind = "GPU" if plan.device == "cuda" else "slot"
            devices = _short(node.devices)
            ranks = f"ranks {node.first_rank}-{last}" if node.slots > 1 else f"rank {last}"
            lines.append(f"  {node.host}: {ranks}, {kind} {devices}")
    return lines


def _start_lines(plan: Plan, recipe: Recipe) -> list[str]:
    """How ranks meet and what they get of this shell, where that is more than one process here has by itself."""
    lines = [f"  rendezvous: {plan.rendezvous}"] if plan.world_size > 1 else []
    if plan.forward and (len(plan.nodes) > 1 or recipe.launch.forward):
        lines.append(f"  forwarded by name: {' '.join(plan.forward)}")
    return lines


def _short(devices: tuple[int, ...]) -> str:
    """`0,1,2`, or `0-63` for more than a line shows."""
    if len(devices) > 8 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    shown = devices if len(devices) <= 32 else (*devices[:16], "...", devices[-1])
    return ",".join(map(str, shown))


def _batch_lines(plan: Plan) -> list[str]:
    b = plan.batch
    tokens = f", {b.tokens_per_step:,} tokens a step" if b.tokens_per_step else ""
    return [
        f"batch: {b.global_samples} samples = {b.micro_samples} micro x {b.accumulation_steps} accumulation "
        f"x {b.data_parallel_ranks} ranks{tokens}"
    ]


def _length_line(plan: Plan, recipe: Recipe) -> str:
    steps, epochs = recipe.train.max_steps, recipe.train.epochs
    if steps is None:
        return f"steps: as many as {epochs:g} epochs take, known when the data are read"
    return f"steps: {steps:,}, {steps * plan.batch.global_samples:,} samples"


def _memory_lines(memory: Memory, choice: bool) -> list[str]:
    """Bytes of a rank, of every ZeRO stage where there is a `choice`."""
    lines = [
        f"memory: {memory.parameters:,} parameters, {memory.trainable:,} trained; "
        f"a checkpoint takes {human(memory.checkpoint)}; on each rank:",
        f"    {'':8}{'weights':>11}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'buckets':>11}{'total':>11}",
    ]
    for stage, parts in (row for row in memory.by_stage if choice or row[0] == memory.chosen):
        mark = "->" if stage == memory.chosen else "  "
        cells = "".join(
            f"{human(part):>{width}}" for part, width in zip((*parts, parts.total), (11, 11, 11, 13, 11, 11))
        )
        lines.append(f"  {mark}{stage if choice else '':8}{cells}")
    return [
        *lines,
        "    activations are an estimate, buckets an upper bound; the rest is exact, without framework overhead",
    ]


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

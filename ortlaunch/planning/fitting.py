"""The smallest worlds of given GPUs that hold a recipe, for each way to divide the model. Pure.

The bytes are those of the plan (memory.py), and what a recipe refuses is refused here by its rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import aligned_table_lines, count_with_noun, human_bytes
from ortlaunch.launch_plan import Memory
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.memory import (
    estimate_rank_memory_or_none,
    merged_model_config_or_none_if_defaults_unknown,
    reason_rank_memory_cannot_be_estimated,
)
from ortlaunch.planning.workload import solve_batch_and_estimate_memory
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.recipe.fields.zero import Zero
from ortlaunch.recipe.rules.rules import broken_rule_problems
from ortlaunch.tables.families import FAMILIES
from ortlaunch.tables.launchers import INSIDE

# As for `micro_size: auto`: a tenth stays free.
_USABLE_SHARE = 0.9
_HOST_COUNTS = (*range(1, 17), 32, 64, 128)


class _Division(NamedTuple):
    """A way to divide the model over the ranks."""

    name: str
    zero_stage: int | None = None
    """DeepSpeed's stage; None: without DeepSpeed."""
    tensor_count: int = 0
    """Ranks that compute a layer together, with FSDP2 or beside ZeRO; 0: without `parallel`."""
    has_copies_on_hosts: bool = False
    """Whether each host has a copy of the model, of two at least (HSDP)."""

    def divided_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe divided in this way, with the other settings of its sections."""
        changes: dict[str, object] = {"zero": None, "parallel": None}
        if self.zero_stage is not None:
            changes["zero"] = (recipe.zero or Zero()).model_copy(update={"stage": self.zero_stage})
        if self.tensor_count:
            mesh = {
                "shard": "auto",
                "replicate": "auto" if self.has_copies_on_hosts else 1,
                "tensor": self.tensor_count,
                **({} if self.tensor_count > 1 else {"tensor_plan": {}, "across_hosts": False}),
            }
            if self.zero_stage is not None:
                mesh |= {"replicate": "auto", "blocks": (), "offload": False}
            changes["parallel"] = (recipe.parallel or Parallel()).model_copy(update=mesh)
        needs_eager = self.tensor_count > 0 or self.zero_stage == 3
        if needs_eager and recipe.engine.name in ("ort", "auto"):
            changes["engine"] = Engine(name="eager")
            if recipe.engine.memory_optimization:
                # In the place of ONNX Runtime's own recomputation.
                again = {"gradient_checkpointing": True}
                changes["model"] = recipe.model.model_copy(update=again)
        return recipe.model_copy(update=changes)


_DIVISIONS = (
    _Division("DDP"),
    *(_Division(f"ZeRO {stage}", zero_stage=stage) for stage in (1, 2, 3)),
    _Division("FSDP2", tensor_count=1),
    _Division("HSDP", tensor_count=1, has_copies_on_hosts=True),
    *(_Division(f"FSDP2, tensor {count}", tensor_count=count) for count in (2, 4, 8)),
    *(_Division(f"ZeRO 1, tensor {count}", 1, count) for count in (2, 4, 8)),
)


@dataclass(frozen=True)
class FittingWorld:
    """The smallest world that holds a recipe divided in one way: an item of `plan --fit --json`."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    sharding: str
    """The way to divide the model: `DDP` (nothing is divided), `ZeRO 1` to `3`, `FSDP2` over all
    GPUs, `HSDP` (a copy on each host), `FSDP2, tensor N`, or `ZeRO 1, tensor N` (DeepSpeed's AutoTP)."""
    engine: str
    """The engine: the recipe's, or eager where ONNX Runtime does not have it."""
    gpus: int | None
    """GPUs of the smallest world; null: no world holds it."""
    hosts: int | None
    """Its hosts."""
    gpu_bytes: int | None
    """Bytes on each GPU of this world; without one, the least of all worlds; null: none is planned."""
    host_bytes: int | None
    """Bytes of host memory for each of its ranks."""
    reason: str
    """Why a smaller world does not hold it; without a world, why none does."""


class _PlannedWorld(NamedTuple):
    """A world, and the memory of its ranks."""

    world: World
    memory: Memory

    @property
    def gpu_bytes(self) -> int:
        """Most bytes on a GPU, at the start or in a step."""
        steady_bytes = dict(self.memory.by_stage)[self.memory.chosen].total
        # ZeRO 1 and 2 take the host's memory at the start, where a GPU lacks room.
        has_start_elsewhere = self.memory.chosen in ("ZeRO 1", "ZeRO 2")
        return steady_bytes if has_start_elsewhere else max(steady_bytes, self.memory.start)

    @property
    def text(self) -> str:
        """Its bytes with the largest part, for a reason."""
        parts = dict(self.memory.by_stage)[self.memory.chosen]._asdict()
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"on {count_with_noun(self.world.rank_count, 'GPU')}: {human_bytes(self.gpu_bytes)}, "
            f"{largest} {human_bytes(parts[largest])}"
        )


def smallest_world_of_each_division(
    recipe: Recipe, gpu_bytes: int, gpus_per_host: int
) -> list[FittingWorld]:
    """Return the smallest world of GPUs for each way to divide the model.

    Args:
        recipe: the recipe; its own `zero` and `parallel` give the other settings.
        gpu_bytes: memory of a GPU.
        gpus_per_host: GPUs of each host.

    Raises:
        PlanError: the model's memory is not known before a run.
    """
    whole = recipe.model_copy(update={"parallel": None})
    if estimate_rank_memory_or_none(whole, 1, 1, "cuda") is None:
        raise PlanError(f"plan --fit: {reason_rank_memory_cannot_be_estimated(recipe)}")
    # Ranks and device are those of the worlds.
    launch = recipe.launch.model_copy(
        update={"nodes": None, "processes_per_node": None, "device": "cuda"}
    )
    recipe = recipe.model_copy(update={"launch": launch})
    worlds = [*_worlds_from_small_to_large(gpus_per_host)]
    return [
        _smallest_world(recipe, division, gpu_bytes * _USABLE_SHARE, worlds)
        for division in _DIVISIONS
    ]


def fitting_world_table_lines(
    worlds: Sequence[FittingWorld], gpu_bytes: int, gpus_per_host: int
) -> list[str]:
    """Return the smallest worlds as a table under a header."""
    rows: list[tuple[str, ...]] = [
        ("sharding", "engine", "GPUs", "hosts", "a GPU", "host", "why not smaller")
    ]
    sharding_names_by_refusal: dict[str, list[str]] = {}
    for world in worlds:
        if world.gpu_bytes is None or world.host_bytes is None:
            sharding_names_by_refusal.setdefault(world.reason, []).append(world.sharding)
            continue
        counts = ("none" if x is None else f"{x:,}" for x in (world.gpus, world.hosts))
        sizes = map(human_bytes, (world.gpu_bytes, world.host_bytes))
        rows.append((world.sharding, world.engine, *counts, *sizes, world.reason))
    return [
        f"smallest worlds of GPUs of {human_bytes(gpu_bytes)}, a tenth of it left free, "
        f"{gpus_per_host} on a host:",
        *aligned_table_lines(rows),
        *(
            f"not {' / '.join(names)}: {reason}"
            for reason, names in sharding_names_by_refusal.items()
        ),
        "host: of its memory, for each rank; activations and overhead are estimates, buckets are "
        "upper bounds, the rest is exact",
    ]


def world_of_gpus(host_count: int, gpus_per_host: int) -> World:
    """Return a world of equal hosts, which need not exist."""
    hosts = (
        Host(f"node{index}", gpus_per_host, tuple(range(gpus_per_host)))
        for index in range(host_count)
    )
    return World(tuple(hosts), INSIDE, "cuda", enclosing_rank=None, notes=(), threads=None)


def _worlds_from_small_to_large(gpus_per_host: int) -> Iterator[World]:
    """Yield parts of one host, by powers of two, then whole hosts."""
    part_sizes = (1 << power for power in range(gpus_per_host.bit_length()))
    yield from (world_of_gpus(1, size) for size in part_sizes if size < gpus_per_host)
    yield from (world_of_gpus(host_count, gpus_per_host) for host_count in _HOST_COUNTS)


def _smallest_world(
    recipe: Recipe,
    division: _Division,
    usable_bytes: float,
    worlds: Sequence[World],
) -> FittingWorld:
    recipe = division.divided_recipe(recipe)
    reason, planned, least = _reason_recipe_is_refused_or_empty(recipe), None, None
    for world in worlds if not reason else ():
        if division.has_copies_on_hosts and len(world.hosts) == 1:
            continue
        try:
            memory = solve_batch_and_estimate_memory(recipe, world).memory
        except PlanError as error:
            # Of the first world of whole hosts, which is the nearest that others may have.
            reason = str(error) if len(world.hosts) == 1 or not reason else reason
            continue
        assert memory is not None  # the caller has tried
        planned = _PlannedWorld(world, memory)
        if planned.gpu_bytes <= usable_bytes:
            return FittingWorld(
                division.name,
                recipe.engine.name,
                world.rank_count,
                len(world.hosts),
                planned.gpu_bytes,
                planned.memory.host.peak,
                least.text if least else "",
            )
        reason = ""
        if least is None or planned.gpu_bytes < least.gpu_bytes:
            least = planned
    return FittingWorld(
        division.name,
        recipe.engine.name,
        None,
        None,
        least.gpu_bytes if least else None,
        least.memory.host.peak if least else None,
        # Also why there is no larger world, where more GPUs would help.
        "; ".join(filter(None, (least and least.text, reason if least is planned else ""))),
    )


def _reason_recipe_is_refused_or_empty(recipe: Recipe) -> str:
    """Return the first rule that the recipe breaks, or why its layers cannot be sliced."""
    for paths, message in broken_rule_problems(recipe):
        return f"{paths[0]}: {message}"
    config = merged_model_config_or_none_if_defaults_unknown(recipe)
    tensor_count = recipe.parallel.tensor if recipe.parallel else 1
    if config is None or recipe.parallel is None or tensor_count == 1:
        return ""
    if not recipe.parallel.tensor_plan and not FAMILIES[config["model_type"]].has_llama_layers:
        return (
            f"transformers has no plan of tensor parallelism for {config['model_type']}; give "
            "parallel.tensor_plan"
        )
    sizes = {
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
    }
    return ", ".join(
        f"{tensor_count} does not divide {name} {size}"
        for name, size in sizes.items()
        if size % tensor_count
    )

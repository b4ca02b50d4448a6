"""The plan of a run: who runs where, the batch equation, the worker's command. Standard library only.

Types and their JSON, for both sides; planning/make_plan.py makes one. A plan is what the run must be: ranks check the
world they find against it before a model is built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.errors import PlanError
from ortlaunch.rank import Rank

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


class Bytes(NamedTuple):
    """Bytes on one rank; `buckets` hold gradients on their way to other ranks."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int = 0

    @property
    def model(self) -> int:
        """What is exact: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return sum(self)


class Memory(NamedTuple):
    """What a plan says about memory: parameter counts, bytes per rank by ZeRO stage, bytes of a checkpoint."""

    parameters: int
    trainable: int
    by_stage: tuple[tuple[str, Bytes], ...]
    chosen: str
    checkpoint: int
    chunk: int = 0
    """Rows whose logits exist at once; 0: all."""
    compared: int = 0
    """Bytes on each rank of the gradients of a step that is compared, the engine's and plain PyTorch's; 0: none is."""


@dataclass(frozen=True)
class Plan:
    """One run, settled. `to_json` and `from_json` are inverse; the same input gives the same text."""

    name: str
    task: str  # what the ranks do: train | parity | evaluate | bench | try (worker/tasks/)
    launcher: str
    device: str
    nodes: tuple[Node, ...]
    batch: BatchPlan
    threads: int | None  # of each rank; None: its host's cores divided among its ranks, counted there
    rendezvous: str
    modules: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    forward: tuple[str, ...]
    memory: Memory | None
    deepspeed: dict[str, Any] | None
    grace_seconds: int = 60  # from a stop that is asked for to SIGKILL

    @property
    def saves(self) -> bool:
        """Whether its ranks have something to save when they are asked to stop."""
        return self.task == "train"

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
    def read(cls, path: Path) -> Plan:
        """The plan in a run folder."""
        return cls.from_json(path.read_text(encoding="utf-8"))

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

"""The plan of a run: who runs where, the batch equation, the worker's command. Standard library only.

Types and their JSON, for both sides; planning/make_plan.py makes one. A plan is what the run must be: ranks check the
world they find against it before a model is built.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.errors import DamagedFile, PlanError
from ortlaunch.launchers import Launcher, launcher_of
from ortlaunch.rank import Rank
from ortlaunch.tasks import TASKS, Task

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_this_host(name: str) -> bool:
    """Whether a host's name is one of this machine's; a user before it (`user@host`) does not matter."""
    own = socket.gethostname()
    return name.rpartition("@")[2] in (*LOCAL_NAMES, own, own.partition(".")[0])


class Node(NamedTuple):
    """One host of the run; its ranks are first_rank .. first_rank + slots - 1."""

    host: str
    """Its name, as ssh takes it."""
    slots: int
    """Ranks on it."""
    first_rank: int
    """The first of them."""
    devices: tuple[int, ...]
    """The GPU of each."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_this_host(self.host)


class BatchPlan(NamedTuple):
    """global_samples == micro_samples x accumulation_steps x data_parallel_ranks; computed here and nowhere else."""

    global_samples: int
    """Samples of an optimizer step, over all ranks."""
    micro_samples: int
    """Samples that a rank takes through one forward and backward pass."""
    accumulation_steps: int
    """Passes of each rank before an optimizer step."""
    data_parallel_ranks: int
    """Ranks with samples of their own: all."""
    tokens_per_step: int | None
    """Tokens of an optimizer step; null: samples have no length."""


# Private memory of one rank and its guardian before a model is built: 230 MiB with torch 2.13 on a CPU, engine eager.
PROCESS = 200 << 20


class Bytes(NamedTuple):
    """Bytes on one rank; plan.json has their sum, too, as `total`."""

    weights: int
    """Parameters."""
    gradients: int
    """Their gradients."""
    optimizer: int
    """Optimizer state with float32 copies of the weights."""
    activations: int
    """What the forward pass keeps for the backward pass: an estimate."""
    buckets: int = 0
    """Gradients on their way to other ranks."""
    overhead: int = 0
    """Estimate of everything else. On a CPU the allocator's reserve, kernels' buffers, graphs; on CUDA the
    contexts and workspaces of torch, ONNX Runtime and NCCL."""

    @property
    def model(self) -> int:
        """What is exact: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return sum(self)


class HostMemory(NamedTuple):
    """Bytes that each rank takes of its host's memory, beside its process and, on a CPU, what it trains with."""

    built: int = 0
    """The model in float32, until it is on its device."""
    offloaded: int = 0
    """What `zero.offload` keeps in the host's memory."""
    snapshot: int = 0
    """Copy of the rank's share of a checkpoint that is written while training goes on (`checkpoint.async`)."""
    nvme: int = 0
    """In files below `zero.offload.nvme_path`, not in memory."""

    @property
    def peak(self) -> int:
        """Most at once: the model is built before anything is offloaded or saved."""
        return max(self.built, self.offloaded + self.snapshot)


class Memory(NamedTuple):
    """What a plan says about memory: parameter counts, bytes per rank by ZeRO stage, bytes of a checkpoint."""

    parameters: int
    """Parameters of the model; tied ones count once."""
    trainable: int
    """Those that get gradients."""
    by_stage: tuple[tuple[str, Bytes], ...]
    """Of each way to shard: `DDP`, `ZeRO 1` and so on."""
    chosen: str
    """The recipe's."""
    checkpoint: int
    """Bytes of a checkpoint, over all ranks."""
    chunk: int = 0
    """Rows whose logits exist at once; 0: all."""
    compared: int = 0
    """Bytes on each rank of the gradients of a step that is compared, the engine's and plain PyTorch's; 0: none is."""
    start: int = 0
    """Most bytes on each device while the model is put there and sharded, before the optimizer has state."""
    host: HostMemory = HostMemory()
    """Bytes that each rank takes of its host's memory."""


@dataclass(frozen=True)
class Plan:
    """One run, settled; its file has also a `format` and the number of ranks, `world_size`."""

    name: str
    """The recipe's `name`."""
    task: str
    """What the ranks do: train, parity, evaluate, bench, try or fabric (of `selftest`)."""
    launcher: str
    """What starts them: local, torchrun or mpi; `inside`: a launcher of the user's own has."""
    device: str
    """cpu or cuda."""
    nodes: tuple[Node, ...]
    """The hosts, in the order of their ranks."""
    batch: BatchPlan
    """The batch equation, solved."""
    threads: int | None
    """CPU threads of each rank; null: its host's cores divided among its ranks, counted there."""
    rendezvous: str
    """How ranks meet, for a person."""
    modules: str
    """Folder of the recipe, where the user's own modules may lie."""
    argv: tuple[str, ...]
    """The command of one rank, to which the run folder is added."""
    env: tuple[tuple[str, str], ...]
    """Environment variables of every rank (`launch.env`)."""
    forward: tuple[str, ...]
    """Names of variables of the user's shell that every rank gets; their values are written nowhere."""
    memory: Memory | None
    """What the run takes; null: a model that cannot be counted."""
    deepspeed: dict[str, Any] | None
    """DeepSpeed's config; null: the run trains without it."""
    grace_seconds: int = 60
    """From a stop that is asked for to SIGKILL."""
    shown: str = "first"
    """Ranks whose output the terminal shows: `first` or `all` (`log.ranks`)."""

    @property
    def started_by(self) -> Launcher:
        """The row of its launcher."""
        return launcher_of(self.launcher)

    @property
    def traits(self) -> Task:
        """The row of its task."""
        return TASKS[self.task]

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
        """The plan in a run folder.

        Raises:
            DamagedFile: it is none.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedFile(
                f"{path}: is no plan, damaged, or of another version of ortlaunch ({error})"
            ) from None

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
                    Node(n["host"], n["slots"], n["first_rank"], tuple(n["devices"]))
                    for n in value["nodes"]
                ),
                "batch": BatchPlan(**value["batch"]),
                "argv": tuple(value["argv"]),
                "env": tuple((key, text) for key, text in value["env"].items()),
                "forward": tuple(value["forward"]),
                "memory": memory and _memory_from(memory),
            }
        )


def _named(plan: Plan) -> dict[str, object]:
    """The plan as plain values, tuples with names as mappings."""
    value = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    value["nodes"] = [node._asdict() for node in plan.nodes]
    value["batch"] = plan.batch._asdict()
    value["env"] = dict(plan.env)
    if plan.memory:
        stages = {
            stage: {**bytes_._asdict(), "total": bytes_.total}
            for stage, bytes_ in plan.memory.by_stage
        }
        value["memory"] = {
            **plan.memory._asdict(),
            "by_stage": stages,
            "host": plan.memory.host._asdict(),
        }
    return value


def _memory_from(value: dict[str, Any]) -> Memory:
    stages = tuple(
        (stage, Bytes(**{name: parts[name] for name in Bytes._fields if name in parts}))
        for stage, parts in value["by_stage"].items()
    )
    return Memory(**{**value, "by_stage": stages, "host": HostMemory(**value.get("host", {}))})

"""The plan of a run: hosts and ranks, the batch equation, the worker's command.

Types and their JSON, for both sides; planning/make_plan.py creates plans. A plan is binding: ranks
compare it with their launcher's world before they build a model. Standard library only.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ortlaunch.base.errors import DamagedFile, PlanError
from ortlaunch.base.json_types import (
    parse_json_or_raise_decode_error,
    read_regular_file_bytes_or_refuse,
    value_fits_annotation_at_any_depth,
)
from ortlaunch.rank import Rank
from ortlaunch.tables.launchers import Launcher, launcher_row
from ortlaunch.tables.tasks import TASKS, Task

# Names that every machine has for itself.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_this_host(name: str) -> bool:
    """Return whether a host's name, perhaps with `user@` before it, is one of this machine's."""
    host_name = socket.gethostname()
    return name.rpartition("@")[2] in (*LOCAL_NAMES, host_name, host_name.partition(".")[0])


class Node(NamedTuple):
    """One host of the run; its ranks are first_rank .. first_rank + slots - 1."""

    host: str
    """Name of the host, as ssh accepts it."""
    slots: int
    """Number of ranks on the host."""
    first_rank: int
    """Number of its first rank."""
    devices: tuple[int, ...]
    """Index of each rank's GPU."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_this_host(self.host)


class BatchPlan(NamedTuple):
    """The batch: global_samples == micro_samples x accumulation_steps x data_parallel_ranks."""

    global_samples: int
    """Samples of an optimizer step, over all ranks."""
    micro_samples: int
    """Samples of one forward and backward pass of a rank."""
    accumulation_steps: int
    """Passes of each rank in an optimizer step."""
    data_parallel_ranks: int
    """Groups of ranks with samples of their own: all ranks, but for `parallel.tensor`."""
    tokens_per_step: int | None
    """Tokens of an optimizer step; null: samples have no length."""


class ProcessMemory(NamedTuple):
    """Bytes of a rank's process beside its model: the interpreter and the libraries."""

    own: int
    """Private bytes."""
    files: int
    """Bytes of library files, which the ranks of a host share."""
    is_measured: bool = False
    """Whether a run in this environment measured them; otherwise they are usual values."""

    @property
    def total(self) -> int:
        """Bytes of a rank that is alone on its host."""
        return self.own + self.files

    def bytes_of_ranks(self, count: int) -> int:
        """Return the bytes of several ranks of a host."""
        return count * self.own + self.files


# Measured with the CPU build of torch 2.13.0, before a run of this environment has measured them.
USUAL_PROCESS = ProcessMemory(300 << 20, 110 << 20)


class Bytes(NamedTuple):
    """Bytes on one rank; plan.json also has their sum, as `total`."""

    weights: int
    """Parameters."""
    gradients: int
    """Gradients of the parameters."""
    optimizer: int
    """Optimizer state with float32 copies of the weights."""
    activations: int
    """Tensors that the forward pass keeps for the backward pass: an estimate."""
    buckets: int = 0
    """Communication buffers of gradients."""
    overhead: int = 0
    """Estimate of everything else: on a CPU the allocator's reserve, buffers of kernels, graphs; on
    CUDA the contexts and workspaces of torch, ONNX Runtime and NCCL."""

    @property
    def model(self) -> int:
        """The exact part: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return sum(self)


class HostMemory(NamedTuple):
    """Bytes of host memory for each rank, without its process and, on a CPU, the training."""

    built: int = 0
    """The model in float32, until it is on its device."""
    offloaded: int = 0
    """Tensors that `zero.offload` or `parallel.offload` keeps in host memory."""
    snapshot: int = 0
    """Copy of the rank's share of a checkpoint that is written during training
    (`checkpoint.async`)."""
    nvme: int = 0
    """Bytes in files below `zero.offload.nvme_path`, not in memory."""
    is_built_on_rank_0_only: bool = False
    """Whether the other ranks get their parts of the model from rank 0."""

    @property
    def peak(self) -> int:
        """Most bytes at one time, of each rank."""
        # The model is built before anything is offloaded or saved.
        return max(
            0 if self.is_built_on_rank_0_only else self.built, self.offloaded + self.snapshot
        )


class Memory(NamedTuple):
    """The memory of a plan: parameters, bytes per rank by ZeRO stage, bytes of a checkpoint."""

    parameters: int
    """Parameters of the model; tied ones count once."""
    trainable: int
    """Parameters that get gradients."""
    process: ProcessMemory
    """The rank's process beside its model."""
    by_stage: tuple[tuple[str, Bytes], ...]
    """Bytes on a rank by sharding: `DDP`, `ZeRO 1` and so on."""
    chosen: str
    """The recipe's sharding."""
    checkpoint: int
    """Bytes of a checkpoint, over all ranks."""
    chunk: int = 0
    """Rows whose logits exist at one time; 0: all."""
    # A comparison keeps the gradients of both engines.
    compared: int = 0
    """Bytes of the overhead on each rank for a comparison with plain PyTorch; 0: none."""
    start: int = 0
    """Most bytes on each device while the model is moved there and sharded, before the optimizer
    has state."""
    host: HostMemory = HostMemory()
    """Bytes of host memory for each rank."""


class Mesh(NamedTuple):
    """The axes of the ranks: rank = (copy x shard + part of the copy) x tensor + slice of the part."""

    replicate: int
    """Copies of the model."""
    shard: int
    """Parts of a copy, by FSDP2."""
    tensor: int = 1
    """Ranks that compute each layer together; they read the same samples, and follow each other."""

    @property
    def ranks_of_copy(self) -> int:
        """Ranks that share a copy of the model; they follow each other."""
        return self.shard * self.tensor


@dataclass(frozen=True)
class Plan:
    """The plan of one run; its file also has a `format` and the number of ranks, `world_size`."""

    name: str
    """The recipe's `name`."""
    task: str
    """The ranks' task: train, parity, evaluate, bench, try or fabric (of `doctor`)."""
    launcher: str
    """The launcher: local, torchrun or mpi; `inside`: a launcher of the user's own."""
    device: str
    """cpu or cuda."""
    nodes: tuple[Node, ...]
    """The hosts, in the order of their ranks."""
    batch: BatchPlan
    """The batch equation, solved."""
    threads: int | None
    """CPU threads of each rank; null: the cores of its host divided among its ranks there."""
    rendezvous: str
    """How ranks meet, as text."""
    modules: str
    """Folder of the recipe, which may have the user's own modules."""
    argv: tuple[str, ...]
    """The command of one rank; the run folder is added to it."""
    env: tuple[tuple[str, str], ...]
    """Environment variables of every rank (`launch.env`)."""
    # Values may be secrets, such as tokens.
    forward: tuple[str, ...]
    """Names of variables of the user's shell that every rank gets; their values are not written to
    any file."""
    memory: Memory | None
    """Memory of the run; null: a model that cannot be counted."""
    deepspeed: dict[str, Any] | None
    """DeepSpeed's config; null: the run trains without DeepSpeed."""
    mesh: Mesh | None = None
    """The axes of the ranks; null: without `parallel`."""
    grace_seconds: int = 60
    """Seconds between a requested stop and SIGKILL."""
    shown: str = "first"
    """Ranks whose output is shown on the terminal: `first` or `all` (`log.ranks`)."""

    @property
    def has_fsdp2(self) -> bool:
        """Whether FSDP2 divides the model over the mesh."""
        return self.mesh is not None and self.deepspeed is None

    @property
    def started_by(self) -> Launcher:
        """The row of its launcher."""
        return launcher_row(self.launcher)

    @property
    def traits(self) -> Task:
        """The row of its task."""
        return TASKS[self.task]

    @property
    def world_size(self) -> int:
        return self.nodes[-1].first_rank + self.nodes[-1].slots

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank in order, as the launcher's variables must describe it."""
        return tuple(
            # Ranks are numbered host by host.
            Rank(node.first_rank + local, self.world_size, local, node.slots)
            for node in self.nodes
            for local in range(node.slots)
        )

    def node_of(self, rank: int) -> Node:
        """Return the host of a rank."""
        # The last host whose first rank is not above it.
        return next(node for node in reversed(self.nodes) if node.first_rank <= rank)

    def to_json(self) -> str:
        """Return the plan as JSON; the same plan gives the same bytes."""
        return json.dumps(
            {"format": 1, "world_size": self.world_size, **_plan_as_mapping(self)}, indent=1
        )

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read the plan of a run folder.

        Raises:
            DamagedFile: the file is not a plan of this version.
        """
        try:
            return cls.from_plan_json_text(read_regular_file_bytes_or_refuse(path).decode())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise DamagedFile(
                f"{path}: is not a plan, is damaged, or is of another version of ortlaunch "
                f"({error})"
            ) from None

    @classmethod
    def from_plan_json_text(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        value = parse_json_or_raise_decode_error(text)
        # Increased when the meaning of a field changes.
        if value.pop("format") != 1:
            raise PlanError("plan.json was written by another version of ortlaunch")
        # In the file for readers; it follows from `nodes`.
        ranks = value.pop("world_size")
        memory = value["memory"]
        plan = cls(
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
                "memory": memory and _memory_from_json_values(memory),
                "mesh": value["mesh"] and Mesh(**value["mesh"]),
            }
        )
        hints = get_type_hints(cls)
        invalid_fields = [
            name
            for name in cls.__dataclass_fields__
            if not value_fits_annotation_at_any_depth(hints[name], getattr(plan, name))
        ]
        if invalid_fields or plan.world_size != ranks or plan.task not in TASKS:
            raise ValueError(
                f"unknown value of {', '.join(invalid_fields) or 'world_size or task'}"
            )
        return plan


def _plan_as_mapping(plan: Plan) -> dict[str, object]:
    """Return the plan as plain values, with named tuples as mappings."""
    value = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    value["nodes"] = [node._asdict() for node in plan.nodes]
    value["batch"] = plan.batch._asdict()
    value["env"] = dict(plan.env)
    value["mesh"] = plan.mesh and plan.mesh._asdict()
    if plan.memory:
        stages = {
            stage: {**bytes_._asdict(), "total": bytes_.total}
            for stage, bytes_ in plan.memory.by_stage
        }
        value["memory"] = {
            **plan.memory._asdict(),
            "process": plan.memory.process._asdict(),
            "by_stage": stages,
            "host": plan.memory.host._asdict(),
        }
    return value


def _memory_from_json_values(memory_values: dict[str, Any]) -> Memory:
    stages = tuple(
        (stage, Bytes(**{name: parts[name] for name in Bytes._fields if name in parts}))
        for stage, parts in memory_values["by_stage"].items()
    )
    host = HostMemory(**memory_values.get("host", {}))
    process = ProcessMemory(**memory_values["process"])
    return Memory(**{**memory_values, "process": process, "by_stage": stages, "host": host})

"""The process group of a run: ranks join (join.py), agree on the world, and part.

Owns torch.distributed's start and end, and the one place that writes rank variables into the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import socket
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.errors import DeviceError, LaunchError, WorldError
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank, detect
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted
from ortlaunch.worker.process_group.flight_recorder import record_collectives
from ortlaunch.worker.process_group.join import JOIN_TIMEOUT, MET, join, on_one_host, uses_mpi
from ortlaunch.worker.supervision.gpus import keep_compiled_kernels, show_planned_gpus, why_no_gpu

# A gloo group that is freed joins its threads while it holds Python's lock, for which one of them may wait: seen at the
# end of a run, when DistributedDataParallel's reference was the last. The group lives as long as the process.
_KEPT: list[object] = []
_MOST_MESH_RANKS = 64


class DistributedContext:
    """The agreed world as one rank sees it."""

    def __init__(self, rank: Rank, device: torch.device, channel: Any = None) -> None:
        self.rank = rank.rank
        self.size = rank.world_size
        self.local = rank
        self.device = device
        self._channel = channel  # torch's group; None: the one of all ranks

    def apart(self) -> DistributedContext:
        """The same ranks on a channel of their own, for another thread (collective)."""
        return DistributedContext(
            self.local, torch.device("cpu"), side_group() if self.size > 1 else None
        )

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self._channel)

    def mean(self, value: float) -> float:
        """Mean over the ranks."""
        return self.sum(value) / self.size

    def sum(self, value: float) -> float:
        """Sum over the ranks, in float64."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self._channel)
        return float(tensor)

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Every rank's numbers, as many of each, in rank order and in float64."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._channel)
        return [tensor.tolist() for tensor in found]

    def gather(self, value: str) -> list[str]:
        """Every rank's text, in rank order."""
        if self.size == 1:
            return [value]
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, value, group=self._channel)
        return texts

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0, in rank order; nothing on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, group=self._channel)
        return found or []

    def print_all(self, lines: list[str]) -> None:
        """Rank 0 prints what any rank has to say, each line once (collective)."""
        texts = self.gather("\n".join(lines))
        if self.rank == 0:
            for line in dict.fromkeys(line for text in texts for line in text.splitlines()):
                print(line, flush=True)


def side_group() -> dist.ProcessGroup:
    """Another group of all ranks, on the CPU, whose messages pass those of the first (collective)."""
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)
    _KEPT.append(made)
    return made


@contextlib.contextmanager
def group(plan: Plan, rank: Rank, run: RunDir) -> Iterator[DistributedContext]:
    """Join the planned world.

    Raises:
        LaunchError: the launcher started another world than the plan's; nothing was built yet.
    """
    agree(plan, rank)
    _raise_limit_of_open_files()
    _connect_on_demand(rank.world_size, os.environ)
    device = _device(plan, rank)
    found = detect(os.environ)
    launcher = found[1] if found else ""
    if device.type == "cuda":
        record_collectives(os.environ, run)
    join(plan, rank, run, _backend(plan.node_of(rank.rank).devices, rank, device))
    _export(rank, device)
    yield DistributedContext(rank, device)
    _KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    if uses_mpi(launcher) and not on_one_host(rank):
        from mpi4py import MPI

        MPI.Finalize()


def _connect_on_demand(ranks: int, environ: MutableMapping[str, str]) -> None:
    """Let gloo connect two ranks at their first message; by default each group connects every rank to all others.

    An all-reduce then needs two connections a rank, whatever the number of ranks
    (`benchmarks/parts.py gloo_connections`). Small runs keep the full mesh, in which a closed port
    ends the start and not the first step. The user's value is kept.
    """
    if ranks > _MOST_MESH_RANKS:
        environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _raise_limit_of_open_files() -> None:
    """To what the host allows: rank 0 holds the store of all ranks, and many shells stop at 1,024."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def agree(plan: Plan, rank: Rank) -> None:
    """The rank that the launcher made must be the planned one."""
    if rank.world_size != plan.world_size:
        raise WorldError(
            f"the plan has {counted(plan.world_size, 'rank')}, the launcher started {rank.world_size}; "
            "nothing was trained, for a smaller world is another training"
        )
    planned = plan.ranks[rank.rank]
    if rank != planned:
        raise WorldError(f"rank {rank.rank} should be {planned}, the launcher made it {rank}")


def agree_on_files(group: DistributedContext, run: RunDir, texts: list[str]) -> None:
    """All ranks must have read the same recipe and plan: one that came early may have met an older run's."""
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    digests = group.gather(digest)
    MET.set()
    other = next((rank for rank, found in enumerate(digests) if found != digest), None)
    if other is not None:
        raise LaunchError(
            f"rank {group.rank} and rank {other} have read different files in {run}; start again, in a folder that all "
            "hosts share"
        )


def _device(plan: Plan, rank: Rank) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    devices = plan.node_of(rank.rank).devices
    index = show_planned_gpus(devices, rank, os.environ)
    keep_compiled_kernels(os.environ)
    here = socket.gethostname()
    if not torch.cuda.is_available():
        raise DeviceError(
            f"the plan trains on cuda, and no GPU is visible on {here}: {why_no_gpu()}"
        )
    present = torch.cuda.device_count()
    if index >= present:
        raise DeviceError(
            f"rank {rank.rank} is planned on GPU {devices[rank.local_rank]} of {here}, and CUDA shows {present} of "
            f"its planned GPUs ({', '.join(map(str, devices))})"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _backend(devices: Sequence[int], rank: Rank, device: torch.device) -> dict[str, object]:
    """Arguments of init_process_group: NCCL with the rank's GPU; gloo on CPUs, and where ranks share a GPU.

    NCCL takes one rank a GPU. Given the GPU, it connects at once, and a barrier does not guess which one to use; torch
    after 2.6.0 and before 2.7.1 hangs then (pytorch issue 153960), and one rank alone has nothing to connect.
    """
    if device.type == "cpu" or len(set(devices)) < len(devices):
        return {"backend": "gloo"}
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:3]))
    is_given = rank.world_size > 1 and not (2, 6, 0) < release < (2, 7, 1)
    return {"backend": "nccl", **({"device_id": device} if is_given else {})}


def _export(rank: Rank, device: torch.device) -> None:
    """DeepSpeed and transformers read the rank here; nobody else writes these.

    LOCAL_RANK is for both the index of the rank's GPU: 0 where CUDA shows a process one GPU alone.
    """
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank if device.index is None else device.index),
        LOCAL_WORLD_SIZE=str(rank.local_world_size),
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")

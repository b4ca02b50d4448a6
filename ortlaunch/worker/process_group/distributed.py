"""The process group of a run: how ranks find each other, agree on the world, and part.

Owns torch.distributed's start and end, and the one place that writes rank variables into the environment. Whoever
reaches the store can send ranks anywhere, and what they send each other is unpickled: on one host it is a file, on more
it listens on the one address that the others use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.errors import DeviceError, LaunchError, MissingDependency, WorldError
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank, detect
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.units import counted
from ortlaunch.worker.process_group.flight_recorder import record_collectives
from ortlaunch.worker.process_group.meeting_port import cannot_meet
from ortlaunch.worker.supervision import interface
from ortlaunch.worker.supervision.gpus import keep_compiled_kernels, show_planned_gpus, why_no_gpu

# A gloo group that is freed joins its threads while it holds Python's lock, for which one of them may wait: seen at the
# end of a run, when DistributedDataParallel's reference was the last. The group lives as long as the process.
_KEPT: list[object] = []
JOIN_TIMEOUT = timedelta(minutes=30)
_LATE_SECONDS, _ARRIVED = 20, "ortlaunch/arrived/{}"
_MET = threading.Event()  # the first collective of all ranks was done
_MOST_MESH_RANKS = 64


class DistributedContext:
    """The agreed world as one rank sees it."""

    def __init__(self, rank: Rank, device: torch.device, channel: Any = None) -> None:
        self.rank, self.size, self.local, self.device = rank.rank, rank.world_size, rank, device
        self._channel = channel  # torch's group; None: the one of all ranks

    def apart(self) -> DistributedContext:
        """The same ranks on a channel of their own, for another thread (collective)."""
        return DistributedContext(self.local, torch.device("cpu"), side_group() if self.size > 1 else None)

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
    _join(plan, rank, run, _backend(plan.node_of(rank.rank).devices, rank, device))
    _export(rank, device)
    yield DistributedContext(rank, device)
    _KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    if _uses_mpi(launcher) and not _on_one_host(rank):
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
    _MET.set()
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
        raise DeviceError(f"the plan trains on cuda, and no GPU is visible on {here}: {why_no_gpu()}")
    present = torch.cuda.device_count()
    if index >= present:
        raise DeviceError(
            f"rank {rank.rank} is planned on GPU {devices[rank.local_rank]} of {here}, and CUDA shows {present} of "
            f"its planned GPUs ({', '.join(map(str, devices))})"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _file_store(path: Path, ranks: int) -> dist.Store:
    """The store of ranks on one host; its file is for its owner alone before torch opens it."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
    store = dist.FileStore(str(path), ranks)
    store.set_timeout(JOIN_TIMEOUT)
    return store


def _uses_mpi(launcher: str) -> bool:
    return "MPI" in launcher or launcher == "MVAPICH"


def _on_one_host(rank: Rank) -> bool:
    return rank.local_world_size == rank.world_size


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


def _join(plan: Plan, rank: Rank, run: RunDir, backend: Mapping[str, Any]) -> None:
    """Start torch.distributed by the means that the launcher gives."""
    found = detect(os.environ)
    launcher = found[1] if found else ""
    if _on_one_host(rank):
        _stay_on_loopback(os.environ)  # one rank alone listens, too
    if rank.world_size == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **backend)
        return
    if _on_one_host(rank):
        store: dist.Store | None = _file_store(run.store, rank.world_size)
    elif launcher == "torchrun" and plan.launcher != "torchrun":
        store = None  # of the user's own torchrun, on the address that it was given
        interface.use(interface.source_address(os.environ["MASTER_ADDR"]) or "", os.environ)
    else:
        hosts = [node.host for node in plan.nodes]
        store = _through_mpi(rank) if _uses_mpi(launcher) else _through_folder(rank, _meeting(run, launcher), hosts)
    try:
        if isinstance(store, dist.TCPStore):
            store.set(_ARRIVED.format(rank.rank), "")
            if rank.rank == 0:
                threading.Thread(target=_report_late_ranks, args=(plan, store.host, store.port), daemon=True).start()
        dist.init_process_group(
            store=store, rank=rank.rank, world_size=rank.world_size, timeout=JOIN_TIMEOUT, **backend
        )
    except dist.DistNetworkError as error:
        if store is not None:
            raise
        raise cannot_meet(os.environ, str(error).splitlines()[0]) from None


def _report_late_ranks(plan: Plan, host: str, port: int) -> None:
    """Print, if no collective of all ranks was done after some seconds, who has not reached rank 0's port."""
    if _MET.wait(_LATE_SECONDS):
        return
    with contextlib.suppress(dist.DistError):  # a connection of its own: the other one waits in its lock
        seen = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        late = [rank for rank in range(plan.world_size) if not seen.check([_ARRIVED.format(rank)])]
        names = ", ".join(f"rank {rank} on host {plan.node_of(rank).host}" for rank in late[:4])
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        where = f"{names}{more} did not reach {host}:{port}, where ranks meet" if late else (
            "every rank reached rank 0, and connections among the others are missing: a firewall between two hosts?"
        )  # fmt: skip
        print(
            f"still joining after {_LATE_SECONDS} s: {where}; `ortlaunch doctor` tries every pair of hosts", flush=True
        )


def _stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """gloo and NCCL listen where this host's name leads, which others may reach, unless the user has said where."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable, value in interface.variables(loopback[0]).items() if loopback else ():
        environ.setdefault(variable, value)


def _through_mpi(rank: Rank) -> dist.Store:
    """The store of rank 0, whose place is told through MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(
            f'ranks under mpirun meet through mpi4py ({error}): pip install "ortlaunch[mpi]"'
        ) from None
    world = MPI.COMM_WORLD
    if world.size != rank.world_size:
        raise WorldError(
            f"mpirun says {counted(rank.world_size, 'rank')}, mpi4py's MPI says {world.size}: they belong to different "
            f"MPI installations ({MPI.Get_library_version().splitlines()[0]}); install mpi4py for the MPI of your "
            "mpirun"
        )
    hosts = world.allgather(socket.gethostname())
    listener = _listener(interface.own_address(hosts, os.environ)) if world.rank == 0 else None
    where = world.bcast(listener and listener.getsockname(), root=0)
    return _tcp_store(rank, where, listener)


def _meeting(run: RunDir, launcher: str) -> Path:
    """Where rank 0 writes its place: emptied by ortlaunch's own torchrun, new for each step of Slurm's."""
    if launcher == "torchrun":
        return run.meeting
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")  # a requeued job keeps its first two
    return run.ready / f"rendezvous-{'.'.join(os.environ.get(name, '') for name in names)}"


def _through_folder(rank: Rank, path: Path, hosts: Sequence[str]) -> dist.Store:
    """The store of rank 0, whose place is told through a file (torchrun on each host; Slurm's steps without MPI)."""
    if rank.rank == 0:
        listener = _listener(interface.own_address(hosts, os.environ))
        write_json(path, listener.getsockname())
        return _tcp_store(rank, listener.getsockname(), listener)
    deadline, pause = time.monotonic() + 300, 0.05
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > deadline:
            raise LaunchError(f"rank 0 did not write {path} within 300 s; is the run folder shared by all hosts?")
        time.sleep(pause)
        pause = min(1.0, pause * 1.2)  # thousands of ranks look, on a shared disk
    return _tcp_store(rank, read_json(path, list), None)


def _listener(address: str) -> socket.socket:
    """A listening socket of this address alone, on a free port."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def _tcp_store(rank: Rank, where: Sequence[Any], listener: socket.socket | None) -> dist.Store:
    """The store at (address, port), held by the rank that has the listener."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = where[0], str(where[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    interface.use(where[0] if listener else interface.source_address(where[0]) or "", os.environ)
    store = functools.partial(dist.TCPStore, where[0], where[1], rank.world_size, wait_for_workers=False)
    if listener:
        return store(is_master=True, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach())
    return store(is_master=False, timeout=JOIN_TIMEOUT)


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

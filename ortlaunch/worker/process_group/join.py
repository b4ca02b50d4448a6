"""How ranks find each other: the store of torch.distributed, in a file on one host, else on one address of rank 0.

Whoever reaches the store can send ranks anywhere, and what they send each other is unpickled: it listens on the one
address that the other hosts use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ortlaunch.errors import LaunchError, MissingDependency, WorldError
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank, detect
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.units import counted
from ortlaunch.worker.process_group.meeting_port import cannot_meet
from ortlaunch.worker.supervision import interface

JOIN_TIMEOUT = timedelta(minutes=30)
MET = threading.Event()  # the first collective of all ranks was done
_LATE_SECONDS = 20
_ARRIVED = "ortlaunch/arrived/{}"


def join(plan: Plan, rank: Rank, run: RunDir, backend: Mapping[str, Any]) -> None:
    """Start torch.distributed by the means that the launcher gives."""
    found = detect(os.environ)
    launcher = found[1] if found else ""
    if on_one_host(rank):
        _stay_on_loopback(os.environ)  # one rank alone listens, too
    if rank.world_size == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **backend)
        return
    if on_one_host(rank):
        store: dist.Store | None = _file_store(run.store, rank.world_size)
    elif launcher == "torchrun" and not plan.started_by.is_ours:
        store = None  # of the user's own torchrun, on the address that it was given
        interface.use(interface.source_address(os.environ["MASTER_ADDR"]) or "", os.environ)
    else:
        hosts = [node.host for node in plan.nodes]
        store = (
            _through_mpi(rank)
            if uses_mpi(launcher)
            else _through_folder(rank, _meeting(run, launcher), hosts)
        )
    try:
        if isinstance(store, dist.TCPStore):
            store.set(_ARRIVED.format(rank.rank), "")
            if rank.rank == 0:
                threading.Thread(
                    target=_report_late_ranks, args=(plan, store.host, store.port), daemon=True
                ).start()
        dist.init_process_group(
            store=store, rank=rank.rank, world_size=rank.world_size, timeout=JOIN_TIMEOUT, **backend
        )
    except dist.DistNetworkError as error:
        if store is not None:
            raise
        raise cannot_meet(os.environ, str(error).splitlines()[0]) from None


def uses_mpi(launcher: str) -> bool:
    """Whether ranks of this launcher, as rank.detect names it, can meet through MPI."""
    return "MPI" in launcher or launcher == "MVAPICH"


def on_one_host(rank: Rank) -> bool:
    """Whether all ranks are on this host."""
    return rank.local_world_size == rank.world_size


def _file_store(path: Path, ranks: int) -> dist.Store:
    """The store of ranks on one host; its file is for its owner alone before torch opens it."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
    store = dist.FileStore(str(path), ranks)
    store.set_timeout(JOIN_TIMEOUT)
    return store


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


def _through_folder(rank: Rank, path: Path, hosts: Sequence[str]) -> dist.Store:
    """The store of rank 0, whose place is told through a file (torchrun on each host; Slurm's steps without MPI)."""
    if rank.rank == 0:
        listener = _listener(interface.own_address(hosts, os.environ))
        write_json(path, listener.getsockname())
        return _tcp_store(rank, listener.getsockname(), listener)
    deadline = time.monotonic() + 300
    pause = 0.05
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank 0 did not write {path} within 300 s; is the run folder shared by all hosts?"
            )
        time.sleep(pause)
        pause = min(1.0, pause * 1.2)  # thousands of ranks look, on a shared disk
    return _tcp_store(rank, read_json(path, list), None)


def _meeting(run: RunDir, launcher: str) -> Path:
    """Where rank 0 writes its place: emptied by ortlaunch's own torchrun, new for each step of Slurm's."""
    if launcher == "torchrun":
        return run.meeting
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
    )  # a requeued job keeps its first two
    return run.ready / f"rendezvous-{'.'.join(os.environ.get(name, '') for name in names)}"


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
    store = functools.partial(
        dist.TCPStore, where[0], where[1], rank.world_size, wait_for_workers=False
    )
    if listener:
        return store(is_master=True, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach())
    return store(is_master=False, timeout=JOIN_TIMEOUT)


def _stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """gloo and NCCL listen where this host's name leads, which others may reach, unless the user has said where."""
    loopback = [name for _, name in socket.if_nameindex() if name == "lo"]
    for variable, value in interface.variables(loopback[0]).items() if loopback else ():
        environ.setdefault(variable, value)


def _report_late_ranks(plan: Plan, host: str, port: int) -> None:
    """Print, if no collective of all ranks was done after some seconds, who has not reached rank 0's port."""
    if MET.wait(_LATE_SECONDS):
        return
    with contextlib.suppress(
        dist.DistError
    ):  # a connection of its own: the other one waits in its lock
        seen = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        late = [rank for rank in range(plan.world_size) if not seen.check([_ARRIVED.format(rank)])]
        names = ", ".join(f"rank {rank} on host {plan.node_of(rank).host}" for rank in late[:4])
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        where = f"{names}{more} did not reach {host}:{port}, where ranks meet" if late else (
            "every rank reached rank 0, and connections among the others are missing: a firewall between two hosts?"
        )  # fmt: skip
        print(
            f"still joining after {_LATE_SECONDS} s: {where}; `ortlaunch doctor` tries every pair of hosts",
            flush=True,
        )

"""The rendezvous of ranks through the store of torch.distributed.

On one host the store is a file, else it listens on one address of rank 0. Everyone who can reach
the store can control the connections of the ranks. Therefore it listens only on the address that
the other hosts use. peers.py checks who has connected on this host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ortlaunch.base.errors import LaunchError, MissingDependency, WorldError, first_message_line
from ortlaunch.base.machine import own_address_on_route_or_none
from ortlaunch.base.units import count_with_noun, first_names_and_count_of_rest
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.worker.process_group.rendezvous_port import ranks_cannot_connect_error
from ortlaunch.worker.supervision import interface

JOIN_TIMEOUT = timedelta(minutes=30)
# Ranks of `doctor` only measure. Somebody waits for their findings.
_JOIN_TIMEOUT_TO_MEASURE = timedelta(minutes=1)
# Set after the first collective of all ranks.
RANKS_MET = threading.Event()
# After this time rank 0 reports ranks that have not arrived.
_LATE_SECONDS = 20
_ARRIVED = "ortlaunch/arrived/{}"


def meet_ranks_and_init_process_group(
    plan: Plan, rank: Rank, run: RunDir, backend_arguments: Mapping[str, Any]
) -> None:
    """Start torch.distributed by the means of the launcher.

    Args:
        plan: the run's plan.
        rank: this rank.
        run: the run folder.
        backend_arguments: arguments of init_process_group for the backend.

    Raises:
        LaunchError: the ranks cannot meet.
    """
    detected_launcher = rank_and_launcher_name_or_none(os.environ)
    launcher = detected_launcher[1] if detected_launcher else ""
    if are_all_on_one_host(rank):
        # Also for a single rank, because it listens, too.
        # By default they listen on the address of the host's name, which other hosts may reach.
        interface.set_gloo_and_nccl_interface_unless_set("127.0.0.1", os.environ)
    if rank.world_size == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **backend_arguments)
        return
    if are_all_on_one_host(rank):
        store: dist.Store | None = _create_private_file_store(run.store, rank.world_size)
    elif launcher == "torchrun" and not plan.started_by.is_ours:
        # The user's own torchrun has a store, at the address of its options.
        store = None
        interface.set_gloo_and_nccl_interface_unless_set(
            own_address_on_route_or_none(os.environ["MASTER_ADDR"]) or "", os.environ
        )
    else:
        hosts = [node.host for node in plan.nodes]
        store = (
            _store_of_rank_0_through_mpi(rank)
            if is_mpi_launcher(launcher)
            else _serve_or_join_store_of_rank_0(rank, _rank_0_address_path(run, launcher), hosts)
        )
    try:
        if isinstance(store, dist.TCPStore):
            store.set(_ARRIVED.format(rank.rank), "")
            if rank.rank == 0:
                threading.Thread(
                    target=_print_late_ranks_unless_met_in_time,
                    args=(plan, store.host, store.port),
                    daemon=True,
                ).start()
        dist.init_process_group(
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=_JOIN_TIMEOUT_TO_MEASURE if plan.task == "fabric" else JOIN_TIMEOUT,
            **backend_arguments,
        )
    except dist.DistNetworkError as error:
        if store is not None:
            raise
        raise ranks_cannot_connect_error(os.environ, first_message_line(error)) from None


@contextlib.contextmanager
def replace_gloo_timeout_by_missing_connections_error() -> Iterator[None]:
    """Replace gloo's timeout in this context, that of the first messages, by the likely cause.

    Raises:
        LaunchError: the ranks did not connect in time.
    """
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        # gloo's own words would make this the effect of another rank's end.
        raise LaunchError(
            "the ranks' first message timed out: a rank is late, or connections among them are "
            "missing; ranks listen "
            f"at ports of net.ipv4.ip_local_port_range ({'-'.join(port_range)} here), and all hosts "
            "must reach these of each other"
        ) from None


def is_mpi_launcher(launcher_name: str) -> bool:
    """Return whether ranks of this launcher (named as by rank.rank_and_launcher_name_or_none) can meet through MPI."""
    return "MPI" in launcher_name or launcher_name == "MVAPICH"


def are_all_on_one_host(rank: Rank) -> bool:
    """Return whether all ranks are on this host."""
    return rank.local_world_size == rank.world_size


def _create_private_file_store(store_path: Path, rank_count: int) -> dist.Store:
    # Create the file before torch does, so that only its owner can ever read or write it.
    os.close(os.open(store_path, os.O_RDWR | os.O_CREAT, 0o600))
    store_path.chmod(0o600)
    store = dist.FileStore(str(store_path), rank_count)
    store.set_timeout(JOIN_TIMEOUT)
    return store


def _store_of_rank_0_through_mpi(rank: Rank) -> dist.Store:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingDependency(
            f'ranks under mpirun connect through mpi4py ({error}): pip install "ortlaunch[mpi]"'
        ) from None
    world = MPI.COMM_WORLD
    if world.size != rank.world_size:
        raise WorldError(
            f"mpirun says {count_with_noun(rank.world_size, 'rank')}, mpi4py's MPI says {world.size}: "
            "they belong to different MPI installations "
            f"({MPI.Get_library_version().splitlines()[0]}); install mpi4py for the MPI of your "
            "mpirun"
        )
    hosts = world.allgather(socket.gethostname())
    listener = (
        _listen_on_free_port(interface.own_address_reachable_by_hosts(hosts, os.environ))
        if world.rank == 0
        else None
    )
    endpoint = world.bcast(listener and listener.getsockname(), root=0)
    return _serve_or_connect_tcp_store(rank, endpoint, listener)


def _serve_or_join_store_of_rank_0(
    rank: Rank, address_file: Path, hosts: Sequence[str]
) -> dist.Store:
    """Return the store of rank 0, whose address is in a file of the run folder.

    This serves torchrun on each host, and Slurm's steps without MPI.
    """
    if rank.rank == 0:
        listener = _listen_on_free_port(interface.own_address_reachable_by_hosts(hosts, os.environ))
        write_json_atomically(address_file, listener.getsockname())
        return _serve_or_connect_tcp_store(rank, listener.getsockname(), listener)
    deadline = time.monotonic() + 300
    pause = 0.05
    while not (address_file.exists() and address_file.stat().st_size):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank 0 did not write {address_file} within 300 s; is the run folder shared by all hosts?"
            )
        time.sleep(pause)
        # Longer pauses, because thousands of ranks may poll a shared disk.
        pause = min(1.0, pause * 1.2)
    return _serve_or_connect_tcp_store(rank, read_json_or_raise_damaged(address_file, list), None)


def _rank_0_address_path(run: RunDir, launcher_name: str) -> Path:
    """Return the file into which rank 0 writes its address.

    ortlaunch's own torchrun empties it at each start. Each step of Slurm has a new one.
    """
    if launcher_name == "torchrun":
        return run.meeting
    # A requeued job keeps the first two and changes the third.
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
    )
    return run.ready / f"rendezvous-{'.'.join(os.environ.get(name, '') for name in names)}"


def _listen_on_free_port(address: str) -> socket.socket:
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def _serve_or_connect_tcp_store(
    rank: Rank, endpoint: Sequence[Any], listener: socket.socket | None
) -> dist.Store:
    """Return the store at `endpoint` (address, port); the rank with the listener serves it."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = endpoint[0], str(endpoint[1])
    # For libraries that read these variables: the store is not that of torchrun's agent.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    interface.set_gloo_and_nccl_interface_unless_set(
        endpoint[0] if listener else own_address_on_route_or_none(endpoint[0]) or "",
        os.environ,
    )
    store = functools.partial(
        dist.TCPStore, endpoint[0], endpoint[1], rank.world_size, wait_for_workers=False
    )
    if listener:
        return store(is_master=True, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach())
    return store(is_master=False, timeout=JOIN_TIMEOUT)


def _print_late_ranks_unless_met_in_time(plan: Plan, host: str, port: int) -> None:
    if RANKS_MET.wait(_LATE_SECONDS):
        return
    # A separate connection, because the first one holds its lock while it waits.
    with contextlib.suppress(dist.DistError):
        late_store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        late_ranks = [
            f"rank {rank} on host {plan.node_of(rank).host}"
            for rank in range(plan.world_size)
            if not late_store.check([_ARRIVED.format(rank)])
        ]
        late_text = (
            f"{first_names_and_count_of_rest(late_ranks, 4)} did not reach {host}:{port}, "
            "where ranks connect"
            if late_ranks
            else "every rank reached rank 0, but connections among the others are missing: check "
            "firewalls between hosts"
        )
        print(
            f"still joining after {_LATE_SECONDS} s: {late_text}; `ortlaunch doctor` tests every "
            "pair of hosts",
            flush=True,
        )

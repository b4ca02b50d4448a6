"""The rank's part of the heartbeats: the address for its supervisor, and the collective count."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import torch.distributed as dist

from ortlaunch.base.errors import LaunchError
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.interface import own_address_reachable_by_hosts
from ortlaunch.worker.supervision.pulse import SharedProgress
from ortlaunch.worker.supervision.watchdog import Watchdog

# The interval of counting collectives.
_COUNT_SECONDS = 1.0


@contextlib.contextmanager
def connect_supervisors_and_count_collectives(
    group: DistributedContext, watchdog: Watchdog
) -> Iterator[None]:
    """Exchange heartbeats between rank supervisors while the context is open (collective)."""
    if group.size == 1:
        yield
        return
    meeting_point = _bind_and_agree_on_heartbeat_endpoint(group, watchdog.exchange.socket)
    if meeting_point is not None:
        watchdog.shared_progress.meeting_point = meeting_point
    ended = threading.Event()
    threading.Thread(
        target=_write_started_collective_count_every_second,
        args=(watchdog.shared_progress, ended),
        daemon=True,
    ).start()
    try:
        yield
    finally:
        ended.set()


def _bind_and_agree_on_heartbeat_endpoint(
    group: DistributedContext, rank_0_socket: socket.socket | None
) -> dict[str, object] | None:
    """Return address, port, host and key of rank 0's supervisor; None if it has no address.

    Rank 0 prints the error if it cannot bind the socket.
    """
    hosts = group.gather(socket.gethostname())
    meeting_point: dict[str, object] | None = None
    error = ""
    if group.rank == 0 and rank_0_socket is not None:
        try:
            rank_0_socket.bind((_rank_0_heartbeat_address(group, hosts), 0))
            address, port = rank_0_socket.getsockname()
            # The key identifies this run's datagrams.
            meeting_point = {
                "address": address, "port": port, "host": hosts[0], "key": os.urandom(16).hex()
            }  # fmt: skip
        except (OSError, LaunchError) as reason:
            error = str(reason)
    if error:
        print(
            f"no heartbeats between ranks, stalls are detected for each rank separately: {error}",
            flush=True,
        )
    agreed_point: dict[str, object] | None = group.gather(meeting_point)[0]
    return agreed_point


def _rank_0_heartbeat_address(group: DistributedContext, hosts: list[str]) -> str:
    one_host = group.local.local_world_size == group.size
    return "127.0.0.1" if one_host else own_address_reachable_by_hosts(hosts, os.environ)


def _write_started_collective_count_every_second(
    shared_progress: SharedProgress, has_ended: threading.Event
) -> None:
    """Record once a second the number of collectives that this rank has started, in all groups."""
    while not has_ended.wait(_COUNT_SECONDS):
        # These names are private in torch: without them heartbeats have no count.
        groups = list(getattr(dist.distributed_c10d._world, "pg_map", {}))
        with contextlib.suppress(RuntimeError, AttributeError):
            shared_progress.store_collective_count(
                sum(group._get_sequence_number_for_group() for group in groups)
            )

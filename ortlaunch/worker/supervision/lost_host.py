"""Detection of lost hosts: their supervisors are silent for seconds and they accept no connection.

TCP gives up only after a quarter of an hour, and mpirun and srun wait for it, so the run would
hang. Each side of a broken link detects the loss by itself and ends its own processes. Standard
library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping

from ortlaunch.base.machine import own_address_on_route_or_none
from ortlaunch.base.process import wait_until_true_or_timeout
from ortlaunch.run_folder.lost_host import LostHost
from ortlaunch.worker.supervision.interface import (
    interface_with_address_or_none,
    is_interface_running_or_unknown,
)
from ortlaunch.worker.supervision.stall_rules import Heartbeat

_SILENT_SECONDS = 7.0
_ANSWER_SECONDS = 2.0
# Seconds until silent hosts are probed again, if they have answered.
_RETRY_SECONDS = 5.0
_LAUNCHER_SECONDS = 2.0
_SSH = 22


class LostHostDetector:
    """One supervisor's check of the hosts that send it heartbeats."""

    def __init__(self, host: str, rank: int) -> None:
        self._host = host
        self._rank = rank
        self._next_check = 0.0

    def detect_lost_host(
        self, heartbeats: Iterable[Heartbeat], supervisor_address_by_rank: Mapping[int, str]
    ) -> LostHost | None:
        """Return the first host that is lost, if any; this host where its own link is down.

        Args:
            heartbeats: the newest heartbeat of each rank.
            supervisor_address_by_rank: of the supervisors, by rank.
        """
        current_time = time.monotonic()
        silent_beats = lowest_rank_heartbeat_of_each_silent_host(heartbeats, self._host)
        if not silent_beats or current_time < self._next_check:
            return None
        for beat in silent_beats:
            address = supervisor_address_by_rank.get(beat.rank)
            if address is not None and not is_host_reachable(address):
                return self._lost_host_or_this_host_without_link(beat, address)
        self._next_check = time.monotonic() + _RETRY_SECONDS
        return None

    def _lost_host_or_this_host_without_link(self, beat: Heartbeat, address: str) -> LostHost:
        # Where this host is the one without a link, every other host looks lost from here.
        dead_interface = own_dead_interface_towards_or_none(address)
        if dead_interface is not None:
            return LostHost(
                self._rank, self._host, f"its network interface {dead_interface} has no link"
            )
        reason = (
            f"no heartbeat from it for {beat.silent + _ANSWER_SECONDS:.0f} s, and {address} "
            "answers no connection"
        )
        return LostHost(beat.rank, beat.host, reason)


def lowest_rank_heartbeat_of_each_silent_host(
    heartbeats: Iterable[Heartbeat], own_host: str
) -> list[Heartbeat]:
    """Return one rank of every other host whose ranks are all silent."""
    hosts: dict[str, list[Heartbeat]] = {}
    for beat in heartbeats:
        hosts.setdefault(beat.host, []).append(beat)
    hosts.pop(own_host, None)
    return [
        min(host_beats)
        for host_beats in hosts.values()
        if min(beat.silent for beat in host_beats) > _SILENT_SECONDS
    ]


def is_host_reachable(address: str) -> bool:
    """Return whether a host accepts or refuses a connection: both prove it alive and reachable."""
    # Two ports, because a firewall may drop packets to one of them.
    probes = []
    for port in (_SSH, random.randrange(20000, 60000)):
        probe = socket.socket()
        probe.setblocking(False)
        with contextlib.suppress(OSError):
            probe.connect((address, port))
        probes.append(probe)
    deadline = time.monotonic() + _ANSWER_SECONDS
    pending_probes = list(probes)
    try:
        while pending_probes and time.monotonic() < deadline:
            _, ready, _ = select.select(
                [], pending_probes, [], max(0.0, deadline - time.monotonic())
            )
            if any(
                probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED)
                for probe in ready
            ):
                return True
            pending_probes = [probe for probe in pending_probes if probe not in ready]
        return False
    finally:
        for probe in probes:
            probe.close()


def own_dead_interface_towards_or_none(peer_address: str) -> str | None:
    """Return this host's interface on the way to `peer_address` if it has no cable or a dead other end."""
    name = interface_with_address_or_none(own_address_on_route_or_none(peer_address) or "")
    return name if name is not None and not is_interface_running_or_unknown(name) else None


def terminate_then_kill_launcher() -> None:
    """End the process that started this supervisor.

    After a lost connection, mpirun's daemon waits for a message that can no longer arrive.
    """
    parent = os.getppid()
    # First SIGTERM, which lets the launcher clean up, then SIGKILL.
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signal_number)
        wait_until_true_or_timeout(lambda: os.getppid() != parent, _LAUNCHER_SECONDS)

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

from ortlaunch.process import wait_until
from ortlaunch.run_folder.lost import LostHost
from ortlaunch.worker.supervision.interface import has_link, interface_with, source_address
from ortlaunch.worker.supervision.stall_rules import Beat

_SILENT_SECONDS = 7.0
_ANSWER_SECONDS = 2.0
# Seconds until silent hosts are probed again, if they have answered.
_AGAIN_SECONDS = 5.0
_LAUNCHER_SECONDS = 2.0
_SSH = 22


class LostHosts:
    """One supervisor's check of the hosts that send it heartbeats."""

    def __init__(self, host: str, rank: int) -> None:
        self._host = host
        self._rank = rank
        self._next_check = 0.0

    def detect(self, beats: Iterable[Beat], addresses: Mapping[int, str]) -> LostHost | None:
        """Return the first host that is lost, if any; this host where its own link is down.

        Args:
            beats: the newest heartbeat of each rank.
            addresses: of the supervisors, by rank.
        """
        now = time.monotonic()
        silent = silent_ranks(beats, self._host)
        if not silent or now < self._next_check:
            return None
        for beat in silent:
            address = addresses.get(beat.rank)
            if address is not None and not answers(address):
                return self._lost(beat, address)
        self._next_check = time.monotonic() + _AGAIN_SECONDS
        return None

    def _lost(self, beat: Beat, address: str) -> LostHost:
        # Where this host is the one without a link, every other host looks lost from here.
        link = link_that_is_down(address)
        if link is not None:
            return LostHost(self._rank, self._host, f"its network interface {link} has no link")
        why = (
            f"no heartbeat from it for {beat.silent + _ANSWER_SECONDS:.0f} s, and {address} "
            "answers no connection"
        )
        return LostHost(beat.rank, beat.host, why)


def silent_ranks(beats: Iterable[Beat], here: str) -> list[Beat]:
    """Return one rank of every other host whose ranks are all silent."""
    hosts: dict[str, list[Beat]] = {}
    for beat in beats:
        hosts.setdefault(beat.host, []).append(beat)
    hosts.pop(here, None)
    return [
        min(all_) for all_ in hosts.values() if min(beat.silent for beat in all_) > _SILENT_SECONDS
    ]


def answers(address: str) -> bool:
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
    waiting = list(probes)
    try:
        while waiting and time.monotonic() < deadline:
            _, ready, _ = select.select([], waiting, [], max(0.0, deadline - time.monotonic()))
            if any(
                probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED)
                for probe in ready
            ):
                return True
            waiting = [probe for probe in waiting if probe not in ready]
        return False
    finally:
        for probe in probes:
            probe.close()


def link_that_is_down(peer: str) -> str | None:
    """Return this host's interface on the way to `peer` if it has no cable or a dead other end."""
    name = interface_with(source_address(peer) or "")
    return name if name is not None and not has_link(name) else None


def end_launcher() -> None:
    """End the process that started this supervisor.

    After a lost connection, mpirun's daemon waits for a message that can no longer arrive.
    """
    parent = os.getppid()
    # First SIGTERM, which lets the launcher clean up, then SIGKILL.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, number)
        wait_until(lambda: os.getppid() != parent, _LAUNCHER_SECONDS)

"""A host that is lost: for seconds nothing is heard of its guardians, and it answers no connection either.

TCP itself gives up after a quarter of an hour, and mpirun and srun wait for it: without this the run would hang.
Each side of the link finds it by itself, and ends what it has. Standard library only.
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

from ortlaunch.run_folder.lost import Lost
from ortlaunch.worker.supervision.interface import has_link, interface_with, source_address
from ortlaunch.worker.supervision.stall import Beat

_SILENT_SECONDS = 7.0
_ANSWER_SECONDS = 2.0
_AGAIN_SECONDS = 5.0  # after an answer
_LAUNCHER_SECONDS = 2.0
_SSH = 22


class LostHosts:
    """One guardian's look at the hosts that it hears of."""

    def __init__(self, host: str, rank: int) -> None:
        self._host = host
        self._rank = rank
        self._next_look = 0.0

    def look(self, beats: Iterable[Beat], addresses: Mapping[int, str]) -> Lost | None:
        """The first host that is lost, if any; this one where its own link is down.

        Args:
            beats: the newest of each rank.
            addresses: of the guardians, by rank.
        """
        now = time.monotonic()
        silent = silent_ranks(beats, self._host)
        if not silent or now < self._next_look:
            return None
        for beat in silent:
            address = addresses.get(beat.rank)
            if address is not None and not answers(address):
                return self._lost(beat, address)
        self._next_look = time.monotonic() + _AGAIN_SECONDS
        return None

    def _lost(self, beat: Beat, address: str) -> Lost:
        link = link_that_is_down(address)
        if link is not None:
            return Lost(self._rank, self._host, f"its network interface {link} has no link")
        why = f"nothing was heard of it for {beat.silent + _ANSWER_SECONDS:.0f} s, and {address} answers no connection"
        return Lost(beat.rank, beat.host, why)


def silent_ranks(beats: Iterable[Beat], here: str) -> list[Beat]:
    """One rank of every other host of which all ranks are silent."""
    hosts: dict[str, list[Beat]] = {}
    for beat in beats:
        hosts.setdefault(beat.host, []).append(beat)
    hosts.pop(here, None)
    return [
        min(all_) for all_ in hosts.values() if min(beat.silent for beat in all_) > _SILENT_SECONDS
    ]


def answers(address: str) -> bool:
    """Whether a host accepts a connection, or refuses one: either takes a living host and a way to it."""
    probes = []
    for port in (_SSH, random.randrange(20000, 60000)):  # a firewall may drop what is for the one
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
    """This host's interface on the way to another, where it has no cable or its other end is down."""
    name = interface_with(source_address(peer) or "")
    return name if name is not None and not has_link(name) else None


def end_launcher() -> None:
    """End what started this guardian: mpirun's daemon waits for a word of mpirun that cannot come any more."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, number)
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.05)

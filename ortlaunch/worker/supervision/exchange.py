"""Beats of all guardians, over UDP to that of rank 0, whose answers tell the others that it lives.

A datagram is JSON behind a keyed digest: a stranger on the network can neither invent a beat nor end a run. Nothing
waits: what is lost is told again in the next beat. Standard library only.

Rank 0's guardian reads about a thousand beats a second, whatever the number of ranks: a receive buffer of Linux's
default size holds 256, and it reads ten times a second. So more ranks beat less often, and count as silent later.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from ortlaunch.json_types import Json
from ortlaunch.rank import Rank
from ortlaunch.worker.supervision.stall import SILENT_SECONDS, Beat

_DIGEST = 16
_STACK_CHARACTERS = 8000  # the end of it, in a datagram
_TIMES = 3  # what is said once
_BEATS_A_SECOND = 1024
_MESSAGES_A_LOOK = 4096  # the guardian has its rank's output to read, too
_BUFFER_BYTES = 4 << 20  # the kernel gives no more than net.core.rmem_max
_LOST_BEATS = 3  # in a row; more are silence


def beat_seconds(ranks: int) -> float:
    """Seconds between two beats of a rank."""
    return max(1.0, ranks / _BEATS_A_SECOND)


class Exchange:
    """One guardian's end. Until the ranks have told where to meet, it hears of its own rank alone."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.is_hub = rank.rank == 0 and rank.world_size > 1
        # The rank itself binds it, to the address that the others reach: descriptors are shared over a fork.
        self.socket = (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) if rank.world_size > 1 else None
        )
        self.stacks: dict[int, str] = {}
        self.orders: list[str] = []
        """What rank 0's guardian has said: `stacks`, `end`."""
        self.is_over = False  # the other side has ended
        self._key = b""
        self._heard: dict[int, tuple[Beat, float, Any]] = {}
        self._gone: set[int] = set()
        self._hub_host = ""
        self._hub_address = ""
        self._hub_heard = time.monotonic()
        self._hub_answers = False
        self._late = _LOST_BEATS * (
            beat_seconds(rank.world_size) - 1.0
        )  # seconds without a beat that say nothing
        if self.socket is not None:
            self.socket.setblocking(False)
            if self.is_hub:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def meet(self, place: Json) -> None:
        """Begin to talk, once the ranks have told where."""
        if self._key or self.socket is None or not place:
            return
        self._key = bytes.fromhex(place["key"])
        self._hub_heard = time.monotonic()
        self._hub_host = place["host"]
        self._hub_address = place["address"]
        if not self.is_hub:
            with contextlib.suppress(OSError):
                self.socket.connect((place["address"], place["port"]))

    @property
    def has_met(self) -> bool:
        return bool(self._key)

    def tell(self, beat: Beat) -> None:
        """Send this rank's beat."""
        if self.is_hub:
            self._heard[0] = (beat, time.monotonic(), None)
        elif self.has_met:
            self._send({"say": "beat", "beat": beat})

    def tell_stacks(self, text: str) -> None:
        """Send where this rank stands."""
        self.stacks[self.rank.rank] = text
        if not self.is_hub and self.has_met:
            self._send({"say": "stacks", "rank": self.rank.rank, "text": text[-_STACK_CHARACTERS:]})

    def order(self, word: str) -> None:
        """Rank 0's guardian to all."""
        for _ in range(_TIMES):
            for _, _, address in self._heard.values():
                self._send({"say": word}, address) if address else None

    def leave(self) -> None:
        """This rank has ended, well or not."""
        if self.is_hub:
            self.order("bye")
        elif self.has_met:
            for _ in range(_TIMES):
                self._send({"say": "bye", "rank": self.rank.rank})

    def beats(self, mine: Beat) -> list[Beat] | None:
        """What is to be judged here; None: rank 0's guardian lives and judges.

        Where nothing ever came of it (UDP is closed, or there is no route), its silence says nothing.
        """
        if not self.has_met:
            return [mine]
        now = time.monotonic()
        if self.is_hub:
            return [
                beat._replace(silent=max(0.0, now - at - self._late))
                for beat, at, _ in self._heard.values()
            ]
        if not self._hub_answers:
            return [mine]
        silent = max(0.0, now - self._hub_heard - self._late)
        if self.is_over or silent <= SILENT_SECONDS:
            return None
        return [
            Beat(
                0,
                self._hub_host,
                0,
                0,
                "unknown",
                -1,
                0,
                0.0,
                silent,
                "",
                mine.warm,
                0.0,
                0.0,
                silent,
            ),
            mine,
        ]

    def addresses(self) -> dict[int, str]:
        """Of the guardians that this one hears of, by rank."""
        if self.is_hub:
            return {rank: address[0] for rank, (_, _, address) in self._heard.items() if address}
        return {0: self._hub_address}

    def never_heard(self) -> list[int]:
        """Ranks of which no beat ever came."""
        return sorted(set(range(self.rank.world_size)) - set(self._heard) - self._gone)

    def wake(self) -> None:
        """This guardian did not run for a while: nobody was silent meanwhile, as far as it knows."""
        now = time.monotonic()
        self._hub_heard = now
        self._heard = {
            rank: (beat, now, address) for rank, (beat, _, address) in self._heard.items()
        }

    def receive(self) -> None:
        """Take in what has come."""
        if self.has_met:
            for said, address in self._messages():
                self._take(said, address)

    def _take(self, said: Json, address: Any) -> None:
        word = said["say"]
        if not self.is_hub:
            self._hub_heard = time.monotonic()
            self._hub_answers = True
            self.is_over |= word == "bye"
            self.orders += [word] if word in ("stacks", "end") else []
        elif word == "beat":
            beat = Beat(*said["beat"])
            self._heard[beat.rank] = (beat, time.monotonic(), address)
            self._send({"say": "heard"}, address)
        elif word == "stacks":
            self.stacks[said["rank"]] = said["text"]
        elif word == "bye":
            self._gone.add(said["rank"])
            self._heard.pop(said["rank"], None)

    def _messages(self) -> Iterator[tuple[dict[str, object], object]]:
        assert self.socket is not None
        for _ in range(_MESSAGES_A_LOOK):
            try:
                data, address = self.socket.recvfrom(1 << 16)
            except (
                OSError
            ):  # nothing more has come; or a datagram was refused, by whoever is on the way
                return
            if hmac.compare_digest(data[:_DIGEST], self._digest(data[_DIGEST:])):
                yield json.loads(data[_DIGEST:]), address

    def _send(self, said: Json, address: Any = None) -> None:
        assert self.socket is not None
        data = json.dumps(said).encode()
        data = self._digest(data) + data
        with contextlib.suppress(OSError):  # no way there now
            self.socket.sendto(data, address) if address else self.socket.send(data)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_DIGEST).digest()

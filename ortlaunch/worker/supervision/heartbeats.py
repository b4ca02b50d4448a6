"""UDP heartbeats of all supervisors to the one of rank 0, whose answers show that it is alive.

A datagram is JSON after a keyed digest, so that no stranger on the network can forge a heartbeat or
end a run. Nothing blocks: the next heartbeat replaces a lost one. Standard library only.

Rank 0's supervisor reads about a thousand heartbeats a second, for any number of ranks: a receive
buffer of Linux's default size holds 256, and it is read ten times a second. Therefore ranks of
larger runs send less often, and count as silent later.
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

from ortlaunch.base.json_types import Json
from ortlaunch.rank import Rank
from ortlaunch.worker.supervision.stall_rules import SILENT_SECONDS, Heartbeat

_DIGEST = 16
# Only the end of a stack fits in a datagram.
_STACK_CHARACTERS = 8000
# Copies of a message that has no successor: UDP may lose one.
_COPIES = 3
_BEATS_A_SECOND = 1024
# The supervisor must also read its rank's output between two calls.
_MESSAGES_AT_ONCE = 4096
# The kernel grants at most net.core.rmem_max.
_BUFFER_BYTES = 4 << 20
# Heartbeats in a row that may be lost before a rank counts as silent.
_LOST_BEATS = 3


def seconds_between_heartbeats(rank_count: int) -> float:
    """Return the seconds between two heartbeats of a rank."""
    return max(1.0, rank_count / _BEATS_A_SECOND)


class HeartbeatExchange:
    """One supervisor's end; until the ranks have met, it knows only its own rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.is_hub = rank.rank == 0 and rank.world_size > 1
        # The rank binds it, to the address that other hosts reach. A fork shares descriptors.
        self.socket = (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) if rank.world_size > 1 else None
        )
        self.stacks: dict[int, str] = {}
        self.orders: list[str] = []
        """Orders received from rank 0's supervisor: `stacks`, `end`."""
        # Set once rank 0's supervisor has signed off.
        self.has_hub_signed_off = False
        self._key = b""
        self._last_beats: dict[int, tuple[Heartbeat, float, Any]] = {}
        self._ended_ranks: set[int] = set()
        self._hub_host = ""
        self._hub_address = ""
        self._hub_heard = time.monotonic()
        self._hub_answers = False
        # Heartbeats less frequent than one a second give this much more time before silence.
        self._extra_silence_seconds = _LOST_BEATS * (
            seconds_between_heartbeats(rank.world_size) - 1.0
        )
        if self.socket is not None:
            self.socket.setblocking(False)
            if self.is_hub:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def connect_to_rank_0_once(self, meeting_point: Json) -> None:
        """Start sending, once the ranks have agreed on a key and an address."""
        if self._key or self.socket is None or not meeting_point:
            return
        self._key = bytes.fromhex(meeting_point["key"])
        self._hub_heard = time.monotonic()
        self._hub_host = meeting_point["host"]
        self._hub_address = meeting_point["address"]
        if not self.is_hub:
            # Connecting a UDP socket sends nothing. Without a route, the stall limits still apply.
            with contextlib.suppress(OSError):
                self.socket.connect((meeting_point["address"], meeting_point["port"]))

    @property
    def has_met_rank_0(self) -> bool:
        return bool(self._key)

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send this rank's heartbeat."""
        if self.is_hub:
            self._last_beats[0] = (heartbeat, time.monotonic(), None)
        elif self.has_met_rank_0:
            self._sign_and_send_message({"say": "beat", "beat": heartbeat})

    def keep_and_send_stacks(self, stacks_text: str) -> None:
        """Send the stacks of this rank's threads."""
        self.stacks[self.rank.rank] = stacks_text
        if not self.is_hub and self.has_met_rank_0:
            self._sign_and_send_message(
                {"say": "stacks", "rank": self.rank.rank, "text": stacks_text[-_STACK_CHARACTERS:]}
            )

    def send_order_to_all_supervisors(self, order_name: str) -> None:
        """Send an order from rank 0's supervisor to all others."""
        for _ in range(_COPIES):
            for _, _, address in self._last_beats.values():
                if address:
                    self._sign_and_send_message({"say": order_name}, address)

    def announce_rank_end(self) -> None:
        """Announce that this rank has ended, whether successfully or not."""
        if self.is_hub:
            self.send_order_to_all_supervisors("bye")
        elif self.has_met_rank_0:
            for _ in range(_COPIES):
                self._sign_and_send_message({"say": "bye", "rank": self.rank.rank})

    def heartbeats_to_judge_here_or_none(self, own_heartbeat: Heartbeat) -> list[Heartbeat] | None:
        """Return the heartbeats to judge here; None where rank 0's supervisor is alive and judges.

        Where no answer of it ever arrived (UDP is blocked, or there is no route), its silence has
        no meaning, and only this rank's heartbeat is returned.
        """
        if not self.has_met_rank_0:
            return [own_heartbeat]
        current_time = time.monotonic()
        if self.is_hub:
            return [
                beat._replace(silent=max(0.0, current_time - arrival - self._extra_silence_seconds))
                for beat, arrival, _ in self._last_beats.values()
            ]
        if not self._hub_answers:
            return [own_heartbeat]
        silent_seconds = max(0.0, current_time - self._hub_heard - self._extra_silence_seconds)
        if self.has_hub_signed_off or silent_seconds <= SILENT_SECONDS:
            return None
        # A placeholder for rank 0, of which nothing but its silence is known.
        return [
            Heartbeat(
                0,
                self._hub_host,
                0,
                0,
                "unknown",
                -1,
                0,
                0.0,
                silent_seconds,
                "",
                own_heartbeat.warm,
                0.0,
                0.0,
                silent_seconds,
            ),
            own_heartbeat,
        ]

    def supervisor_address_by_rank(self) -> dict[int, str]:
        """Return the addresses of the supervisors that send to this one, by rank."""
        if self.is_hub:
            return {
                rank: address[0] for rank, (_, _, address) in self._last_beats.items() if address
            }
        return {0: self._hub_address}

    def ranks_without_any_heartbeat(self) -> list[int]:
        """Return the ranks that never sent a heartbeat."""
        return sorted(set(range(self.rank.world_size)) - set(self._last_beats) - self._ended_ranks)

    def restart_silence_clocks(self) -> None:
        """Restart all silence clocks: this process was suspended, so it could receive nothing."""
        current_time = time.monotonic()
        self._hub_heard = current_time
        self._last_beats = {
            rank: (beat, current_time, address)
            for rank, (beat, _, address) in self._last_beats.items()
        }

    def receive_and_process_messages(self) -> None:
        """Process all messages that have arrived."""
        if self.has_met_rank_0:
            for message, address in self._receive_authenticated_messages_and_senders():
                self._store_message_and_acknowledge_heartbeat(message, address)

    def _store_message_and_acknowledge_heartbeat(self, message: Json, sender_address: Any) -> None:
        message_type = message["say"]
        if not self.is_hub:
            self._hub_heard = time.monotonic()
            self._hub_answers = True
            self.has_hub_signed_off |= message_type == "bye"
            self.orders += [message_type] if message_type in ("stacks", "end") else []
        elif message_type == "beat":
            beat = Heartbeat(*message["beat"])
            self._last_beats[beat.rank] = (beat, time.monotonic(), sender_address)
            self._sign_and_send_message({"say": "heard"}, sender_address)
        elif message_type == "stacks":
            self.stacks[message["rank"]] = message["text"]
        elif message_type == "bye":
            self._ended_ranks.add(message["rank"])
            self._last_beats.pop(message["rank"], None)

    def _receive_authenticated_messages_and_senders(
        self,
    ) -> Iterator[tuple[dict[str, object], object]]:
        assert self.socket is not None
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                data, address = self.socket.recvfrom(1 << 16)
            # BlockingIOError: no more messages now. Others: the network refused a datagram.
            except OSError:
                return
            if hmac.compare_digest(data[:_DIGEST], self._keyed_digest(data[_DIGEST:])):
                yield json.loads(data[_DIGEST:]), address

    def _sign_and_send_message(
        self, message: dict[str, object], receiver_address: Any = None
    ) -> None:
        assert self.socket is not None
        data = json.dumps(message).encode()
        data = self._keyed_digest(data) + data
        # Without a route now, the next heartbeat replaces this message.
        with contextlib.suppress(OSError):
            if receiver_address:
                self.socket.sendto(data, receiver_address)
            else:
                self.socket.send(data)

    def _keyed_digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=_DIGEST).digest()

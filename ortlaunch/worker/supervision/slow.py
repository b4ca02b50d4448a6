"""Ranks that are alive but far slower than their peers over many steps; named once, and nothing is ended.

What counts is a rank's own time: reading batches and forward passes, in which no rank waits for another. On a GPU the
passes are timed by CUDA events (gpus.ForwardTimer), for the host only launches them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.worker.supervision.stall import Beat

# of a look, at least
_STEPS = 50
_SECONDS = 30.0
_TIMES = 2.0  # as long as its peers
_SHARE = 0.2  # of a step that its peers could save


class Slow(NamedTuple):
    """One that holds the others up."""

    rank: int
    host: str
    own_seconds: float
    """A step, for reading its batches and its forward passes."""
    peers_seconds: float
    """The median of the others."""
    steps: int
    """Over so many."""

    @property
    def summary(self) -> str:
        times = (
            f"{self.own_seconds / self.peers_seconds:.1f} times as long as its peers"
            if self.peers_seconds
            else ""
        )
        return (
            f"rank {self.rank} on host {self.host} is slow: reading batches and forward passes take it "
            f"{self.own_seconds:.3g} s a step, {times or 'and its peers no time'} ({self.peers_seconds:.3g} s), over "
            f"{self.steps} steps; all wait for it"
        )


class SlowRanks:
    """Looks at beats, and names each slow rank once."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._since: dict[int, Beat] = {}
        self._at = 0.0

    def look(self, beats: Sequence[Beat], now: float) -> Slow | None:
        """A rank that was not named before, if there is one.

        Args:
            beats: the newest of each rank.
            now: in seconds, from anywhere.
        """
        if (
            not self._since
            or set(self._since) != {beat.rank for beat in beats}
            or not all(b.warm for b in beats)
        ):
            self._begin(beats, now)
            return None
        steps = min(beat.step - self._since[beat.rank].step for beat in beats)
        if steps < _STEPS or now - self._at < _SECONDS:
            return None
        found = self._slowest(beats, (now - self._at) / steps)
        self._begin(beats, now)
        return found

    def _begin(self, beats: Sequence[Beat], now: float) -> None:
        self._since = {beat.rank: beat for beat in beats}
        self._at = now

    def _slowest(self, beats: Sequence[Beat], step_seconds: float) -> Slow | None:
        own = {beat.rank: self._own_seconds(beat) for beat in beats}
        slowest = max(beats, key=lambda beat: own[beat.rank])
        peers = statistics.median(seconds for rank, seconds in own.items() if rank != slowest.rank)
        mine = own[slowest.rank]
        if (
            slowest.rank in self._named
            or mine < _TIMES * peers
            or mine - peers < _SHARE * step_seconds
        ):
            return None
        self._named.add(slowest.rank)
        return Slow(
            slowest.rank, slowest.host, mine, peers, slowest.step - self._since[slowest.rank].step
        )

    def _own_seconds(self, beat: Beat) -> float:
        """A step."""
        before = self._since[beat.rank]
        return (beat.own_seconds - before.own_seconds) / (beat.step - before.step)

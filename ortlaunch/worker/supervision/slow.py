"""Detection of ranks that are alive but far slower than their peers over many steps.

Each slow rank is reported once, and nothing is ended. The measure is a rank's own time: reading
batches and forward passes, in which no rank waits for another. On a GPU the passes are timed by
CUDA events (gpus.ForwardTimer), because the host only launches them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.worker.supervision.stall_rules import Beat

# A comparison covers at least this many steps and seconds.
_STEPS = 50
_SECONDS = 30.0
# The least own time of a slow rank, as a multiple of its peers' median.
_TIMES = 2.0
# The least time that the rank's peers could save without it, as a share of a step.
_SHARE = 0.2


class Slow(NamedTuple):
    """A rank that delays the others."""

    rank: int
    host: str
    own_seconds: float
    """Seconds a step for reading its batches and for its forward passes."""
    peers_seconds: float
    """The median of the other ranks' seconds."""
    steps: int
    """Steps that the comparison covers."""

    @property
    def summary(self) -> str:
        times = (
            f"{self.own_seconds / self.peers_seconds:.1f} times as long as its peers"
            if self.peers_seconds
            else ""
        )
        return (
            f"rank {self.rank} on host {self.host} is slow: reading batches and forward passes "
            f"take it {self.own_seconds:.3g} s per step, {times or 'and its peers no time'} "
            f"({self.peers_seconds:.3g} s), over {self.steps} steps; all others wait for it"
        )


class SlowRanks:
    """A comparison of heartbeats that returns each slow rank once."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._since: dict[int, Beat] = {}
        self._at = 0.0

    def detect(self, beats: Sequence[Beat], now: float) -> Slow | None:
        """Return a slow rank that was not returned before, if there is one.

        Args:
            beats: the newest heartbeat of each rank.
            now: seconds of any monotonic clock.
        """
        # A new set of ranks, or warm-up steps, would distort the comparison.
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
        """Return the rank's own seconds a step since the comparison began."""
        before = self._since[beat.rank]
        return (beat.own_seconds - before.own_seconds) / (beat.step - before.step)

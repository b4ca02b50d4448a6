"""Detection of ranks that are alive but far slower than their peers over many steps.

Each slow rank is reported once, and nothing is ended. The measure is a rank's own time: reading
batches and forward passes, in which no rank waits for another. On a GPU the passes are timed by
CUDA events (gpus.ForwardTimer), because the host only launches them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.worker.supervision.stall_rules import Heartbeat

# A comparison covers at least this many steps and seconds.
_LEAST_STEPS = 50
_LEAST_SECONDS = 30.0
# The least own time of a slow rank, as a multiple of its peers' median.
_SLOW_FACTOR = 2.0
# The least time that the rank's peers could save without it, as a share of a step.
_LEAST_STEP_SHARE = 0.2


class SlowRank(NamedTuple):
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


class SlowRankDetector:
    """A comparison of heartbeats that returns each slow rank once."""

    def __init__(self) -> None:
        self._reported_ranks: set[int] = set()
        self._first_beats: dict[int, Heartbeat] = {}
        self._began_at = 0.0

    def compare_and_return_newly_slow_rank_or_none(
        self, heartbeats: Sequence[Heartbeat], current_time: float
    ) -> SlowRank | None:
        """Return a slow rank that was not returned before, if there is one.

        Args:
            heartbeats: the newest heartbeat of each rank.
            current_time: seconds of any monotonic clock.
        """
        # A new set of ranks, or warm-up steps, would distort the comparison.
        if (
            not self._first_beats
            or set(self._first_beats) != {beat.rank for beat in heartbeats}
            or not all(b.warm for b in heartbeats)
        ):
            self._begin_comparison(heartbeats, current_time)
            return None
        steps = min(beat.step - self._first_beats[beat.rank].step for beat in heartbeats)
        if steps < _LEAST_STEPS or current_time - self._began_at < _LEAST_SECONDS:
            return None
        slow_rank = self._mark_and_return_slowest_rank_if_newly_slow(
            heartbeats, (current_time - self._began_at) / steps
        )
        self._begin_comparison(heartbeats, current_time)
        return slow_rank

    def _begin_comparison(self, beats: Sequence[Heartbeat], current_time: float) -> None:
        self._first_beats = {beat.rank: beat for beat in beats}
        self._began_at = current_time

    def _mark_and_return_slowest_rank_if_newly_slow(
        self, beats: Sequence[Heartbeat], step_seconds: float
    ) -> SlowRank | None:
        seconds_by_rank = {beat.rank: self._own_seconds_per_step(beat) for beat in beats}
        slowest = max(beats, key=lambda beat: seconds_by_rank[beat.rank])
        peers_median = statistics.median(
            seconds for rank, seconds in seconds_by_rank.items() if rank != slowest.rank
        )
        slowest_seconds = seconds_by_rank[slowest.rank]
        if (
            slowest.rank in self._reported_ranks
            or slowest_seconds < _SLOW_FACTOR * peers_median
            or slowest_seconds - peers_median < _LEAST_STEP_SHARE * step_seconds
        ):
            return None
        self._reported_ranks.add(slowest.rank)
        return SlowRank(
            slowest.rank,
            slowest.host,
            slowest_seconds,
            peers_median,
            slowest.step - self._first_beats[slowest.rank].step,
        )

    def _own_seconds_per_step(self, beat: Heartbeat) -> float:
        """Return the rank's own seconds a step since the comparison began."""
        first_beat = self._first_beats[beat.rank]
        return (beat.own_seconds - first_beat.own_seconds) / (beat.step - first_beat.step)

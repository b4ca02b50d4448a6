"""Rules by which a run counts as stalled, and which ranks the others wait for.

These are pure functions from heartbeats to a verdict; watchdog.py ends the ranks. docs/concepts/ends.md has
the table of limits for users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.base.units import count_with_noun, first_names_and_count_of_rest
from ortlaunch.worker.supervision.pulse import AUTO, STAGES

# As timeout(1).
EXIT_STATUS = 124
# torch has a limit of its own for this phase, and a late rank reports itself.
MEETING = "connecting to the other ranks"
SILENT_SECONDS = 5.0
# Limits of `auto` in the training steps: at least so many seconds, and so many times a step.
_LEAST_SECONDS = 60.0
_TIMES_A_STEP = 20.0
# Seconds of `auto` in all other phases.
_OTHER_PHASE_SECONDS = 600.0
# Factor for a rank that computes, with `auto` in the training steps.
_BUSY_FACTOR = 10.0
# Factor for a rank that computes, with a limit in seconds in all other phases.
_OTHER_PHASE_BUSY_FACTOR = 30.0
_STATES = {
    "T": "stopped: SIGSTOP, or a frozen control group",
    "D": "waiting for a disk or a device",
    "Z": "dead",
}


class Heartbeat(NamedTuple):
    """The state of one rank, as its supervisor sends it in a heartbeat."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    moves: int
    collectives: int
    still: float
    """Seconds without a progress mark."""
    idle: float
    """Seconds without computing, reading or writing."""
    state: str
    """The process state, as the kernel's letter for it."""
    warm: bool
    step_seconds: float
    own_seconds: float
    silent: float = 0.0
    """Seconds since this heartbeat arrived."""

    @property
    def is_silent(self) -> bool:
        return self.silent > SILENT_SECONDS


class StallLimits(NamedTuple):
    """The longest times without progress."""

    idle_seconds: float
    """If all ranks are idle."""
    busy_seconds: float
    """If one computes."""


class StallVerdict(NamedTuple):
    """A stalled run: the ranks that the others wait for, all heartbeats, and its seconds."""

    beats_behind: tuple[Heartbeat, ...]
    beats: tuple[Heartbeat, ...]
    seconds: float

    @property
    def summary(self) -> str:
        """One line with the ranks, their location and the seconds of the stall."""
        return (
            f"the run has stalled for {self.seconds:.0f} s: "
            f"{_late_and_waiting_ranks_text(self.beats_behind, self.beats)}"
        )


def stall_limits(
    stall_seconds: float, past_first_steps: bool, median_step_seconds: float
) -> StallLimits:
    """Return the limits without progress.

    Args:
        stall_seconds: `train.stall_seconds`; AUTO learns from the steps so far.
        past_first_steps: whether the ranks are in the training steps, past the first two.
        median_step_seconds: median seconds of the last steps.
    """
    if stall_seconds != AUTO:
        busy_factor = 1 if past_first_steps else _OTHER_PHASE_BUSY_FACTOR
        return StallLimits(stall_seconds, stall_seconds * busy_factor)
    if not past_first_steps:
        return StallLimits(_OTHER_PHASE_SECONDS, float("inf"))
    learned_seconds = max(_LEAST_SECONDS, _TIMES_A_STEP * median_step_seconds)
    return StallLimits(learned_seconds, learned_seconds * _BUSY_FACTOR)


def stall_verdict_or_none(
    heartbeats: Sequence[Heartbeat], stall_seconds: float, watched_seconds: float
) -> StallVerdict | None:
    """Return a verdict if the ranks stand still, else None.

    Args:
        heartbeats: the newest heartbeat of each rank.
        stall_seconds: `train.stall_seconds`.
        watched_seconds: seconds since the judging process started, or resumed after a suspension; earlier
            silence does not count, because it could receive nothing.
    """
    quiet_seconds = min(watched_seconds, *(beat.still + beat.silent for beat in heartbeats))
    late_beats = heartbeats_of_ranks_behind(heartbeats)
    limits = stall_limits(
        stall_seconds,
        all(beat.warm for beat in late_beats),
        max(beat.step_seconds for beat in heartbeats),
    )
    # "t": a debugger holds the process.
    if quiet_seconds <= limits.idle_seconds or any(
        beat.state == "t" or beat.phase == MEETING for beat in heartbeats
    ):
        return None
    is_at_work = any(beat.idle <= limits.idle_seconds and not beat.is_silent for beat in late_beats)
    return (
        None
        if is_at_work and quiet_seconds <= limits.busy_seconds
        else StallVerdict(late_beats, tuple(heartbeats), quiet_seconds)
    )


def heartbeats_of_ranks_behind(heartbeats: Sequence[Heartbeat]) -> tuple[Heartbeat, ...]:
    """Return the ranks that the others wait for.

    They are the silent ranks, else the stopped ones, else those with the fewest marks, else all.
    """
    fewest = min(map(_progress_order, heartbeats))
    for late_beats in (
        [beat for beat in heartbeats if beat.is_silent],
        [beat for beat in heartbeats if beat.state in ("T", "Z")],
        [beat for beat in heartbeats if _progress_order(beat) == fewest],
    ):
        if late_beats:
            return tuple(late_beats)
    return tuple(heartbeats)


def _progress_order(beat: Heartbeat) -> tuple[int, int]:
    return beat.moves, beat.collectives


def _late_and_waiting_ranks_text(
    late_beats: Sequence[Heartbeat], beats: Sequence[Heartbeat]
) -> str:
    late_text = first_names_and_count_of_rest([*map(_rank_location_text, late_beats)], 4)
    behind_ranks = {beat.rank for beat in late_beats}
    waiting_beats = [beat for beat in beats if beat.rank not in behind_ranks]
    if not waiting_beats:
        return late_text + ("; no rank is behind the others" if len(beats) > 1 else "")
    others = (
        f"rank {waiting_beats[0].rank} waits"
        if len(waiting_beats) == 1
        else f"{count_with_noun(len(waiting_beats), 'other rank')} wait"
    )
    return f"{late_text}; {others} {_step_and_phase_text(waiting_beats[0])}"


def _rank_location_text(beat: Heartbeat) -> str:
    if beat.is_silent:
        silence_text = (
            f"no heartbeat for {beat.silent:.0f} s (its host, the network to it, or its rank "
            "supervisor hangs)"
        )
        return f"rank {beat.rank} on host {beat.host}: {silence_text}; it was last seen {_step_and_phase_text(beat)}"
    state = f" ({_STATES[beat.state]})" if beat.state in _STATES else ""
    return f"rank {beat.rank} on host {beat.host}, process {beat.pid}{state}, {_step_and_phase_text(beat)}"


def _step_and_phase_text(beat: Heartbeat) -> str:
    if beat.phase in STAGES:
        return f"in step {beat.step + 1}, {beat.phase}"
    return f"after step {beat.step}, {beat.phase}" if beat.step else beat.phase

"""Rules by which a run counts as stalled, and which ranks the others wait for.

These are pure functions from heartbeats to a verdict; watchdog.py ends the ranks. docs/ends.md has
the table of limits for users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.units import count_with_noun
from ortlaunch.worker.supervision.pulse import AUTO, STAGES

# As timeout(1).
EXIT_STATUS = 124
# torch has a limit of its own for this phase, and a late rank reports itself.
MEETING = "connecting to the other ranks"
SILENT_SECONDS = 5.0
# Limits of `auto` in the training steps: at least so many seconds, and so many times a step.
_LEAST = 60.0
_TIMES_A_STEP = 20.0
# Seconds of `auto` in all other phases.
_ELSEWHERE = 600.0
# Factor for a rank that computes, with `auto` in the training steps.
_BUSY_TIMES = 10.0
# Factor for a rank that computes, with a limit in seconds in all other phases.
_BUSY_TIMES_ELSEWHERE = 30.0
_STATES = {
    "T": "stopped: SIGSTOP, or a frozen control group",
    "D": "waiting for a disk or a device",
    "Z": "dead",
}


class Beat(NamedTuple):
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


class Verdict(NamedTuple):
    """A stalled run: the ranks that the others wait for, all heartbeats, and its seconds."""

    behind: tuple[Beat, ...]
    beats: tuple[Beat, ...]
    seconds: float

    @property
    def summary(self) -> str:
        """One line with the ranks, their location and the seconds of the stall."""
        return f"the run has stalled for {self.seconds:.0f} s: {_who(self.behind, self.beats)}"


def limits(setting: float, warm: bool, step_seconds: float) -> tuple[float, float]:
    """Return the limits without progress, in seconds: if all ranks are idle, and if one computes.

    Args:
        setting: `train.stall_seconds`; AUTO learns from the steps so far.
        warm: whether the ranks are in the training steps, past the first two.
        step_seconds: median seconds of the last steps.
    """
    if setting != AUTO:
        return setting, setting * (1 if warm else _BUSY_TIMES_ELSEWHERE)
    if not warm:
        return _ELSEWHERE, float("inf")
    learnt = max(_LEAST, _TIMES_A_STEP * step_seconds)
    return learnt, learnt * _BUSY_TIMES


def judge(beats: Sequence[Beat], setting: float, watched: float) -> Verdict | None:
    """Return a verdict if the ranks stand still, else None.

    Args:
        beats: the newest heartbeat of each rank.
        setting: `train.stall_seconds`.
        watched: seconds since the judging process started, or resumed after a suspension; earlier
            silence does not count, because it could receive nothing.
    """
    quiet = min(watched, *(beat.still + beat.silent for beat in beats))
    late = behind(beats)
    idle, busy = limits(
        setting, all(beat.warm for beat in late), max(beat.step_seconds for beat in beats)
    )
    # "t": a debugger holds the process.
    if quiet <= idle or any(beat.state == "t" or beat.phase == MEETING for beat in beats):
        return None
    at_work = any(beat.idle <= idle and not beat.is_silent for beat in late)
    return None if at_work and quiet <= busy else Verdict(late, tuple(beats), quiet)


def behind(beats: Sequence[Beat]) -> tuple[Beat, ...]:
    """Return the ranks that the others wait for.

    They are the silent ranks, else the stopped ones, else those with the fewest marks, else all.
    """
    fewest = min(map(_passed, beats))
    for late in (
        [beat for beat in beats if beat.is_silent],
        [beat for beat in beats if beat.state in ("T", "Z")],
        [beat for beat in beats if _passed(beat) == fewest],
    ):
        if late:
            return tuple(late)
    return tuple(beats)


def _passed(beat: Beat) -> tuple[int, int]:
    return beat.moves, beat.collectives


def _who(late: Sequence[Beat], beats: Sequence[Beat]) -> str:
    names = ", ".join(_named(beat) for beat in late[:4])
    more = f" and {len(late) - 4} more" if len(late) > 4 else ""
    behind_ranks = {beat.rank for beat in late}
    waiting = [beat for beat in beats if beat.rank not in behind_ranks]
    if not waiting:
        return f"{names}{more}" + ("; no rank is behind the others" if len(beats) > 1 else "")
    others = (
        f"rank {waiting[0].rank} waits"
        if len(waiting) == 1
        else f"{count_with_noun(len(waiting), 'other rank')} wait"
    )
    return f"{names}{more}; {others} {_place(waiting[0])}"


def _named(beat: Beat) -> str:
    if beat.is_silent:
        said = (
            f"no heartbeat for {beat.silent:.0f} s (its host, the network to it, or its rank "
            "supervisor hangs)"
        )
        return f"rank {beat.rank} on host {beat.host}: {said}; it was last seen {_place(beat)}"
    state = f" ({_STATES[beat.state]})" if beat.state in _STATES else ""
    return f"rank {beat.rank} on host {beat.host}, process {beat.pid}{state}, {_place(beat)}"


def _place(beat: Beat) -> str:
    """Return the rank's step and phase as a phrase."""
    if beat.phase in STAGES:
        return f"in step {beat.step + 1}, {beat.phase}"
    return f"after step {beat.step}, {beat.phase}" if beat.step else beat.phase

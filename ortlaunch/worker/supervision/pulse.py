"""A rank's step, phase and number of progress marks, in memory shared with its supervisor.

The rank writes a few values at points that it passes anyway. The supervisor reads them, also while
the rank's Python is busy in C code, stopped or dead, and sends them to rank 0's supervisor
(heartbeats.py). Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ortlaunch.json_types import Json
from ortlaunch.process import bytes_read_and_written, iterate_process_tree, read_stat

STAGES = (
    "",
    "reading a batch",
    "a forward or backward pass",
    "the forward pass",
    "the backward pass",
    "the optimizer step",
)
READING, PASSING, FORWARD, BACKWARD, STEPPING = range(1, len(STAGES))
TRAINING = "training"
# Layout in bytes: indices of 64-bit values, the phase's name, then the meeting address as JSON.
_BYTES = 4096
_PHASE = 1024
_PLACE = 2048
_RING = 64
_KEPT_STEPS = 32
# Indices of 64-bit integers; from _RING on, the last step durations.
_STEP, _MOVES, _STAGE, _COLLECTIVES, _STEPS_HERE, _RUNG = range(6)
# Indices of doubles: seconds.
_SINCE, _LIMIT, _OWN = range(8, 11)
AUTO = -1.0
NEVER = float("inf")


class RankProgress(NamedTuple):
    """A rank's progress at one moment."""

    step: int
    phase: str
    moves: int
    """Progress marks passed so far. All ranks pass the same ones: one with fewer is behind."""
    still: float
    """Seconds since the last mark."""
    collectives: int
    """Collective operations that the rank has begun, as torch counted them about a second ago."""
    warm: bool
    """Whether the rank is in the training steps, past the first two."""
    step_seconds: float
    """Median of the last steps, in seconds; 0 if there are too few."""
    own_seconds: float
    """Seconds of all steps so far for reading batches and forward passes.

    In these parts no rank waits for another.
    """


class Pulse:
    """Progress in shared memory: made by the supervisor before the fork, written by the rank."""

    def __init__(self) -> None:
        # An anonymous mapping stays shared after the fork.
        self._memory = mmap.mmap(-1, _BYTES)
        view = memoryview(self._memory)
        self._numbers = view[:_PHASE].cast("q")
        self._seconds = view[:_PHASE].cast("d")
        self._seconds[_SINCE], self._seconds[_LIMIT] = time.monotonic(), AUTO
        self._phase = ""
        self._stepped_at = 0.0
        # A gpus.ForwardTimer for forward passes on a GPU.
        self.timer: Any = None

    def doing(self, phase: str) -> None:
        """Begin another phase."""
        self._phase = phase
        self._show(phase.encode()[:200])
        # The first step of the phase has no predecessor to be timed against.
        self._numbers[_STAGE], self._stepped_at = 0, 0.0
        self._move()

    @contextlib.contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """While the context is open, show a long operation of this rank that others may not do now.

        It is a phase, but no progress mark.
        """
        around = bytes(self._memory[_PHASE : _PHASE + 256])
        self._show(phase.encode())
        try:
            yield
        finally:
            self._show(around)
            self._seconds[_SINCE] = time.monotonic()

    def _show(self, phase: bytes) -> None:
        self._memory[_PHASE : _PHASE + 256] = phase.ljust(256, b"\0")

    def at(self, stage: int) -> None:
        """Begin a part of a step."""
        now = time.monotonic()
        before = self._numbers[_STAGE]
        if before == READING or (before == FORWARD and self.timer is None):
            self._seconds[_OWN] += now - self._seconds[_SINCE]
        if before == FORWARD and self.timer is not None:
            self.timer.end()
        if stage == FORWARD and self.timer is not None:
            self._seconds[_OWN] += self.timer.read()
            self.timer.begin()
        self._numbers[_STAGE] = stage
        self._seconds[_SINCE] = now
        self._numbers[_MOVES] += 1

    def begin(self, done: int) -> None:
        """Count steps from here; `done` of them are complete."""
        self._numbers[_STEP], self._numbers[_STEPS_HERE] = done, 0
        self.doing(TRAINING)

    def step(self) -> None:
        """Count one completed step."""
        self.doing(TRAINING) if self._phase != TRAINING else self.at(0)
        now = self._seconds[_SINCE]
        numbers = self._numbers
        numbers[_STEP] += 1
        numbers[_STEPS_HERE] += 1
        # The first two steps are warm-up, and no measure.
        if self._stepped_at and numbers[_STEPS_HERE] > 2:
            self._seconds[_RING + numbers[_RUNG] % _KEPT_STEPS] = now - self._stepped_at
            numbers[_RUNG] += 1
        self._stepped_at = now

    def tick(self) -> None:
        """Count a mark within a phase; all ranks must do so alike."""
        self._move()

    def alive(self) -> None:
        """Record activity within a phase, on this rank alone, so without a mark."""
        self._seconds[_SINCE] = time.monotonic()

    def _move(self) -> None:
        self._seconds[_SINCE] = time.monotonic()
        self._numbers[_MOVES] += 1

    @property
    def limit(self) -> float:
        """Seconds of `train.stall_seconds`, or AUTO, or NEVER."""
        return self._seconds[_LIMIT]

    @limit.setter
    def limit(self, seconds: float) -> None:
        self._seconds[_LIMIT] = seconds

    def count_collectives(self, number: int) -> None:
        """Store the number of collective operations begun so far."""
        self._numbers[_COLLECTIVES] = number

    @property
    def place(self) -> Json:
        """The address at which supervisors meet; empty until the ranks have stored it."""
        text = self._memory[_PLACE:].rstrip(b"\0")
        # A text without its closing brace is still being written.
        return json.loads(text) if text.endswith(b"}") else {}

    @place.setter
    def place(self, value: dict[str, object]) -> None:
        text = json.dumps(value).encode()
        assert len(text) <= _BYTES - _PLACE
        self._memory[_PLACE : _PLACE + len(text)] = text

    def read(self) -> RankProgress:
        """Return the rank's current progress."""
        numbers = self._numbers
        rungs = min(self._numbers[_RUNG], _KEPT_STEPS)
        phase = self._memory[_PHASE : _PHASE + 256].rstrip(b"\0").decode(errors="replace")
        stage = STAGES[numbers[_STAGE] % len(STAGES)] if phase == TRAINING else ""
        steps = list(self._seconds[_RING : _RING + rungs])
        return RankProgress(
            step=numbers[_STEP],
            phase=stage or phase or "starting",
            moves=numbers[_MOVES],
            still=max(0.0, time.monotonic() - self._seconds[_SINCE]),
            collectives=numbers[_COLLECTIVES],
            warm=phase == TRAINING and numbers[_STEPS_HERE] >= 2,
            step_seconds=statistics.median(steps) if len(steps) >= 3 else 0.0,
            own_seconds=self._seconds[_OWN],
        )


class Activity:
    """A check whether a process and its descendants compute, read or write (Linux)."""

    # Share of one core below which a process counts as idle.
    _SHARE = 0.03
    # Bytes a second below which it counts as idle.
    _BYTES = 1 << 12

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._before = self._used()
        self._at = time.monotonic()
        self._active = time.monotonic()

    def idle(self) -> float:
        """Return the seconds since the last activity; to be called about once a second."""
        now = time.monotonic()
        used = self._used()
        passed = max(now - self._at, 1e-3)
        # Without a measurement, the process counts as active.
        if (
            used is None
            or self._before is None
            or used[0] - self._before[0] > self._SHARE * passed
            or used[1] - self._before[1] > self._BYTES * passed
        ):
            self._active = now
        self._before = used
        self._at = now
        return now - self._active

    def _used(self) -> tuple[float, int] | None:
        """Return processor seconds, and bytes to and from files and sockets; None if unreadable."""
        try:
            both = [
                (read_stat(pid), bytes_read_and_written(pid))
                for pid in iterate_process_tree(self.pid)
            ]
        except (OSError, ValueError):
            return None
        ticks = sum(stat.ticks + stat.children_ticks for stat, _ in both if stat is not None)
        return ticks / os.sysconf("SC_CLK_TCK"), sum(moved for _, moved in both)

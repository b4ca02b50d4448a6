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

from ortlaunch.base.process import (
    bytes_read_and_written_or_raise_if_ended,
    iterate_process_and_descendant_ids,
    read_process_stat_or_none,
)

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
_MEETING_POINT = 2048
_RING = 64
_KEPT_STEPS = 32
# Indices of 64-bit integers; from _RING on, the last step durations.
_STEP, _MOVES, _STAGE, _COLLECTIVES, _STEPS_HERE, _RING_COUNT = range(6)
# Indices of doubles: seconds.
_LAST_MARK, _LIMIT, _OWN_SECONDS = range(8, 11)
AUTO = -1.0
NEVER = float("inf")


class RankProgress(NamedTuple):
    """A rank's progress at one moment."""

    step: int
    phase: str
    progress_marks: int
    """Progress marks passed so far. All ranks pass the same ones: one with fewer is behind."""
    seconds_since_mark: float
    """Seconds since the last mark."""
    collective_count: int
    """Collective operations that the rank has begun, as torch counted them about a second ago."""
    past_first_steps: bool
    """Whether the rank is in the training steps, past the first two."""
    step_seconds: float
    """Median of the last steps, in seconds; 0 if there are too few."""
    own_seconds: float
    """Seconds of all steps so far for reading batches and forward passes.

    In these parts no rank waits for another.
    """


class SharedProgress:
    """Progress in shared memory: made by the supervisor before the fork, written by the rank."""

    def __init__(self) -> None:
        # An anonymous mapping stays shared after the fork.
        self._memory = mmap.mmap(-1, _BYTES)
        view = memoryview(self._memory)
        self._integers = view[:_PHASE].cast("q")
        self._seconds = view[:_PHASE].cast("d")
        self._seconds[_LAST_MARK], self._seconds[_LIMIT] = time.monotonic(), AUTO
        self._phase = ""
        self._stepped_at = 0.0
        # A gpus.ForwardTimer for forward passes on a GPU.
        self.timer: Any = None

    def begin_phase_and_count_progress(self, phase: str) -> None:
        """Begin another phase."""
        self._phase = phase
        self._show_phase(phase.encode()[:200])
        # The first step of the phase has no predecessor to be timed against.
        self._integers[_STAGE], self._stepped_at = 0, 0.0
        self.count_progress_mark()

    @contextlib.contextmanager
    def show_phase_until_end_without_counting_progress(self, phase: str) -> Iterator[None]:
        """While the context is open, show a long operation of this rank that others may not do now.

        It is a phase, but no progress mark.
        """
        surrounding_phase = bytes(self._memory[_PHASE : _PHASE + 256])
        self._show_phase(phase.encode())
        try:
            yield
        finally:
            self._show_phase(surrounding_phase)
            self._seconds[_LAST_MARK] = time.monotonic()

    def _show_phase(self, phase: bytes) -> None:
        self._memory[_PHASE : _PHASE + 256] = phase.ljust(256, b"\0")

    def end_stage_and_begin_next(self, stage: int) -> None:
        """Begin a part of a step."""
        current_time = time.monotonic()
        previous_stage = self._integers[_STAGE]
        if previous_stage == READING or (previous_stage == FORWARD and self.timer is None):
            self._seconds[_OWN_SECONDS] += current_time - self._seconds[_LAST_MARK]
        if previous_stage == FORWARD and self.timer is not None:
            self.timer.end()
        if stage == FORWARD and self.timer is not None:
            self._seconds[_OWN_SECONDS] += self.timer.read()
            self.timer.begin()
        self._integers[_STAGE] = stage
        self._seconds[_LAST_MARK] = current_time
        self._integers[_MOVES] += 1

    def begin_steps(self, completed_steps: int) -> None:
        """Count steps from here; `completed_steps` of them are complete."""
        self._integers[_STEP], self._integers[_STEPS_HERE] = completed_steps, 0
        self.begin_phase_and_count_progress(TRAINING)

    def count_step_and_record_duration(self) -> None:
        """Count one completed step."""
        if self._phase != TRAINING:
            self.begin_phase_and_count_progress(TRAINING)
        else:
            self.end_stage_and_begin_next(0)
        current_time = self._seconds[_LAST_MARK]
        integers = self._integers
        integers[_STEP] += 1
        integers[_STEPS_HERE] += 1
        # The first two steps are warm-up, and no measure.
        if self._stepped_at and integers[_STEPS_HERE] > 2:
            self._seconds[_RING + integers[_RING_COUNT] % _KEPT_STEPS] = (
                current_time - self._stepped_at
            )
            integers[_RING_COUNT] += 1
        self._stepped_at = current_time

    def count_progress_mark(self) -> None:
        """Count a mark within a phase; all ranks must do so alike."""
        self._seconds[_LAST_MARK] = time.monotonic()
        self._integers[_MOVES] += 1

    def restart_stall_clock(self) -> None:
        """Record activity within a phase, on this rank alone, so without a mark."""
        self._seconds[_LAST_MARK] = time.monotonic()

    @property
    def stall_seconds(self) -> float:
        """Seconds of `train.stall_seconds`, or AUTO, or NEVER."""
        return self._seconds[_LIMIT]

    @stall_seconds.setter
    def stall_seconds(self, seconds: float) -> None:
        self._seconds[_LIMIT] = seconds

    def store_collective_count(self, collective_count: int) -> None:
        """Store the number of collective operations begun so far."""
        self._integers[_COLLECTIVES] = collective_count

    @property
    def meeting_point(self) -> dict[str, object]:
        """The address at which supervisors meet; empty until the ranks have stored it."""
        text = self._memory[_MEETING_POINT:].rstrip(b"\0")
        # A text without its closing brace is still being written.
        return json.loads(text) if text.endswith(b"}") else {}

    @meeting_point.setter
    def meeting_point(self, meeting_point: dict[str, object]) -> None:
        text = json.dumps(meeting_point).encode()
        assert len(text) <= _BYTES - _MEETING_POINT
        self._memory[_MEETING_POINT : _MEETING_POINT + len(text)] = text

    def read_rank_progress(self) -> RankProgress:
        """Return the rank's current progress."""
        integers = self._integers
        kept_steps = min(self._integers[_RING_COUNT], _KEPT_STEPS)
        phase = self._memory[_PHASE : _PHASE + 256].rstrip(b"\0").decode(errors="replace")
        stage = STAGES[integers[_STAGE] % len(STAGES)] if phase == TRAINING else ""
        steps = list(self._seconds[_RING : _RING + kept_steps])
        return RankProgress(
            step=integers[_STEP],
            phase=stage or phase or "starting",
            progress_marks=integers[_MOVES],
            seconds_since_mark=max(0.0, time.monotonic() - self._seconds[_LAST_MARK]),
            collective_count=integers[_COLLECTIVES],
            past_first_steps=phase == TRAINING and integers[_STEPS_HERE] >= 2,
            step_seconds=statistics.median(steps) if len(steps) >= 3 else 0.0,
            own_seconds=self._seconds[_OWN_SECONDS],
        )


class ProcessActivityMeter:
    """A check whether a process and its descendants compute, read or write (Linux)."""

    # Share of one core below which a process counts as idle.
    _SHARE = 0.03
    # Bytes a second below which it counts as idle.
    _BYTES = 1 << 12

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._last_used = self._cpu_seconds_and_io_bytes_or_none()
        self._measured_at = time.monotonic()
        self._active_at = time.monotonic()

    def measure_idle_seconds(self) -> float:
        """Return the seconds since the last activity; to be called about once a second."""
        current_time = time.monotonic()
        used_resources = self._cpu_seconds_and_io_bytes_or_none()
        passed_seconds = max(current_time - self._measured_at, 1e-3)
        # Without a measurement, the process counts as active.
        if (
            used_resources is None
            or self._last_used is None
            or used_resources[0] - self._last_used[0] > self._SHARE * passed_seconds
            or used_resources[1] - self._last_used[1] > self._BYTES * passed_seconds
        ):
            self._active_at = current_time
        self._last_used = used_resources
        self._measured_at = current_time
        return current_time - self._active_at

    def _cpu_seconds_and_io_bytes_or_none(self) -> tuple[float, int] | None:
        """Return processor seconds, and bytes to and from files and sockets; None if unreadable."""
        try:
            stats_and_bytes = [
                (read_process_stat_or_none(pid), bytes_read_and_written_or_raise_if_ended(pid))
                for pid in iterate_process_and_descendant_ids(self.pid)
            ]
        except (OSError, ValueError):
            return None
        ticks = sum(
            stat.ticks + stat.children_ticks for stat, _ in stats_and_bytes if stat is not None
        )
        return ticks / os.sysconf("SC_CLK_TCK"), sum(
            moved_bytes for _, moved_bytes in stats_and_bytes
        )

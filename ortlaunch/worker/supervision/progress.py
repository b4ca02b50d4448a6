"""A run's current phase, the seconds of each phase so far, and rank 0's live line on a terminal.

Before step 1 the line names the current activity; then it shows the progress in steps.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ortlaunch.run_folder.folder import terminal_columns_of_command
from ortlaunch.units import COLUMNS, wrap_lines
from ortlaunch.worker.supervision.pulse import BACKWARD, FORWARD, PASSING, READING, TRAINING, Pulse
from ortlaunch.worker.supervision.terminal import LIVE

Batch = TypeVar("Batch")
_BAR_FORMAT = (
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
    "[{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


def print_wrapped(*lines: str) -> None:
    """Print lines, wrapped at the columns of the command's terminal."""
    columns = terminal_columns_of_command() or COLUMNS
    print(*(wrap_lines(line, columns) for line in lines), sep="\n", flush=True)


class Progress:
    """A clock of the phases, and tqdm's line, which the supervisor draws.

    The supervisor keeps the line below all other output, and out of the logs.
    """

    def __init__(self, rank: int, pulse: Pulse | None = None) -> None:
        self.pulse = pulse or Pulse()
        self.width = terminal_columns_of_command() if rank == 0 else None
        self.bar: Any = None
        self._activity = ""
        self._since = time.perf_counter()
        self._seconds = dict[str, float]()
        self._steps = list[float]()

    def step_seconds(self) -> float | None:
        """Return the median duration of a step, without evaluations and saves; None: too few."""
        # The first two steps compile and fill caches.
        durations = [later - earlier for earlier, later in itertools.pairwise(self._steps[1:])]
        return statistics.median(durations) if durations else None

    def seconds_by_activity(self) -> dict[str, float]:
        """Return the seconds of each phase so far, in the order in which the phases began."""
        self._switch_activity(self._activity)
        return {
            activity: round(seconds, 3) for activity, seconds in self._seconds.items() if activity
        }

    def _switch_activity(self, activity: str) -> None:
        """Count the time from now on for this phase."""
        current_time = time.perf_counter()
        self._seconds[self._activity] = (
            self._seconds.get(self._activity, 0.0) + current_time - self._since
        )
        self._activity = activity
        self._since = current_time

    def show_activity(self, activity: str) -> None:
        """Show the current activity, in place of the bar if there is one."""
        self._switch_activity(activity)
        self.pulse.begin_phase(activity)
        if self.width is not None:
            _print_live_line(f"{activity} ...")

    def show_detail(self, text: str) -> None:
        """Show how far the current activity is."""
        self.pulse.record_activity()
        if self.width is not None:
            _print_live_line(text)

    def begin_steps(self, done_steps: int, total_steps: int) -> None:
        """Count steps from now on; `done_steps` of them are complete."""
        self._switch_activity(TRAINING)
        self.pulse.begin_steps(done_steps)
        if self.width is not None:
            from tqdm import tqdm

            # tqdm's monitor thread would draw between our lines.
            tqdm.monitor_interval = 0
            # One column fewer than the terminal has: a full line would wrap.
            self.bar = tqdm(
                total=total_steps,
                initial=done_steps,
                desc="training",
                unit="step",
                bar_format=_BAR_FORMAT,
                leave=False,
                file=_ProgressBarFile(),
                ncols=self.width - 1,
                mininterval=0.2,
            )

    def count_step(self) -> None:
        """Count one more step."""
        self._switch_activity(TRAINING)
        self._steps.append(self._seconds.get(TRAINING, 0.0))
        self.pulse.count_step()
        if self.bar is not None:
            self.bar.update()

    def mark_forward_passes(self, module: Any, timer: object = None) -> None:
        """Mark where this module's forward passes begin and end, with `timer` on a GPU."""
        self.pulse.timer = timer
        module.register_forward_pre_hook(lambda *_: self.pulse.begin_stage(FORWARD))
        module.register_forward_hook(lambda *_: self.pulse.begin_stage(BACKWARD))

    def mark_reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and mark the time in which each is read."""
        source = iter(batches)
        while True:
            self.pulse.begin_stage(READING)
            try:
                batch = next(source)
            except StopIteration:
                return
            self.pulse.begin_stage(PASSING)
            yield batch

    def show_loss(self, loss: float | None) -> None:
        """Show the newest known loss beside the bar."""
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}")

    @contextlib.contextmanager
    def show_during(self, activity: str) -> Iterator[None]:
        """Show an activity while the context is open; then restore the bar."""
        previous_activity = self._activity
        self.show_activity(activity)
        yield
        self._switch_activity(previous_activity)
        self.pulse.begin_phase(previous_activity)
        if self.bar is not None:
            self.bar.refresh()


class _ProgressBarFile:
    """The file that tqdm writes to."""

    # tqdm picks block characters or ASCII by it.
    encoding = sys.stdout.encoding

    def write(self, text: str) -> None:
        if stripped_text := text.strip("\r\n "):
            _print_live_line(stripped_text)

    def flush(self) -> None:
        """Do nothing: each write is shown at once."""


def _print_live_line(text: str) -> None:
    sys.stdout.write(LIVE.decode() % text)
    sys.stdout.flush()

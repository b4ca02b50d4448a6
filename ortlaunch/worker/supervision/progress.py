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
_FORM = (
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
        self._what = ""
        self._since = time.perf_counter()
        self._seconds = dict[str, float]()
        self._steps = list[float]()

    def step_seconds(self) -> float | None:
        """Return the median duration of a step, without evaluations and saves; None: too few."""
        # The first two steps compile and fill caches.
        durations = [after - before for before, after in itertools.pairwise(self._steps[1:])]
        return statistics.median(durations) if durations else None

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far, in the order in which the phases began."""
        self._turn_to(self._what)
        return {what: round(seconds, 3) for what, seconds in self._seconds.items() if what}

    def _turn_to(self, what: str) -> None:
        """Count the time from now on for this phase."""
        now = time.perf_counter()
        self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._since
        self._what = what
        self._since = now

    def doing(self, what: str) -> None:
        """Show the current activity, in place of the bar if there is one."""
        self._turn_to(what)
        self.pulse.doing(what)
        if self.width is not None:
            _print(f"{what} ...")

    def show(self, text: str) -> None:
        """Show how far the current activity is."""
        self.pulse.alive()
        if self.width is not None:
            _print(text)

    def begin(self, done: int, steps: int) -> None:
        """Count steps from now on; `done` of them are complete."""
        self._turn_to(TRAINING)
        self.pulse.begin(done)
        if self.width is not None:
            from tqdm import tqdm

            # tqdm's monitor thread would draw between our lines.
            tqdm.monitor_interval = 0
            # One column fewer than the terminal has: a full line would wrap.
            self.bar = tqdm(
                total=steps,
                initial=done,
                desc="training",
                unit="step",
                bar_format=_FORM,
                leave=False,
                file=_ProgressBarFile(),
                ncols=self.width - 1,
                mininterval=0.2,
            )

    def step(self) -> None:
        """Count one more step."""
        self._turn_to(TRAINING)
        self._steps.append(self._seconds.get(TRAINING, 0.0))
        self.pulse.step()
        if self.bar is not None:
            self.bar.update()

    def watch(self, module: Any, timer: object = None) -> None:
        """Mark where this module's forward passes begin and end, with `timer` on a GPU."""
        self.pulse.timer = timer
        module.register_forward_pre_hook(lambda *_: self.pulse.at(FORWARD))
        module.register_forward_hook(lambda *_: self.pulse.at(BACKWARD))

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and mark the time in which each is read."""
        source = iter(batches)
        while True:
            self.pulse.at(READING)
            try:
                batch = next(source)
            except StopIteration:
                return
            self.pulse.at(PASSING)
            yield batch

    def show_loss(self, loss: float | None) -> None:
        """Show the newest known loss beside the bar."""
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}")

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Show an activity while the context is open; then restore the bar."""
        before = self._what
        self.doing(what)
        yield
        self._turn_to(before)
        self.pulse.doing(before)
        if self.bar is not None:
            self.bar.refresh()


class _ProgressBarFile:
    """The file that tqdm writes to."""

    # tqdm picks block characters or ASCII by it.
    encoding = sys.stdout.encoding

    def write(self, text: str) -> None:
        if shown := text.strip("\r\n "):
            _print(shown)

    def flush(self) -> None:
        """Do nothing: each write is shown at once."""


def _print(text: str) -> None:
    sys.stdout.write(LIVE.decode() % text)
    sys.stdout.flush()

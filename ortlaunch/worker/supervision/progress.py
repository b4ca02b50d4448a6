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

from ortlaunch.base.units import COLUMNS, wrap_long_lines_except_commands
from ortlaunch.run_folder.folder import terminal_columns_of_command
from ortlaunch.worker.supervision.pulse import (
    BACKWARD,
    FORWARD,
    PASSING,
    READING,
    TRAINING,
    SharedProgress,
)
from ortlaunch.worker.supervision.terminal import LIVE

_Item = TypeVar("_Item")
_BAR_FORMAT = (
    "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
    "[{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


def print_wrapped_to_terminal_width(*lines: str) -> None:
    """Print lines, wrapped at the columns of the command's terminal."""
    columns = terminal_columns_of_command() or COLUMNS
    print(*(wrap_long_lines_except_commands(line, columns) for line in lines), sep="\n", flush=True)


class Progress:
    """A clock of the phases, and tqdm's line, which the supervisor draws.

    The supervisor keeps the line below all other output, and out of the logs.
    """

    def __init__(self, rank: int, shared_progress: SharedProgress | None = None) -> None:
        self.shared_progress = shared_progress or SharedProgress()
        self.width = terminal_columns_of_command() if rank == 0 else None
        self.bar: Any = None
        self._activity = ""
        self._since = time.perf_counter()
        self._seconds = dict[str, float]()
        self._steps = list[float]()

    def median_step_seconds_or_none(self) -> float | None:
        """Return the median duration of a step, without evaluations and saves; None: too few."""
        # The first two steps compile and fill caches.
        durations = [later - earlier for earlier, later in itertools.pairwise(self._steps[1:])]
        return statistics.median(durations) if durations else None

    def seconds_by_activity(self) -> dict[str, float]:
        """Return the seconds of each phase so far, in the order in which the phases began."""
        self._count_elapsed_time_and_switch_activity(self._activity)
        return {
            activity: round(seconds, 3) for activity, seconds in self._seconds.items() if activity
        }

    def _count_elapsed_time_and_switch_activity(self, activity: str) -> None:
        current_time = time.perf_counter()
        self._seconds[self._activity] = (
            self._seconds.get(self._activity, 0.0) + current_time - self._since
        )
        self._activity = activity
        self._since = current_time

    def begin_and_show_activity(self, activity: str) -> None:
        """Show the current activity, in place of the bar if there is one."""
        self._count_elapsed_time_and_switch_activity(activity)
        self.shared_progress.begin_phase_and_count_progress(activity)
        if self.width is not None:
            _print_live_line(f"{activity} ...")

    def show_activity_detail(self, detail_text: str) -> None:
        """Show how far the current activity is."""
        self.shared_progress.restart_stall_clock()
        if self.width is not None:
            _print_live_line(detail_text)

    def begin_steps_and_show_bar(self, completed_steps: int, total_steps: int) -> None:
        """Count steps from now on; `completed_steps` of them are complete."""
        self._count_elapsed_time_and_switch_activity(TRAINING)
        self.shared_progress.begin_steps(completed_steps)
        if self.width is not None:
            from tqdm import tqdm

            # tqdm's monitor thread would draw between our lines.
            tqdm.monitor_interval = 0
            # One column fewer than the terminal has: a full line would wrap.
            self.bar = tqdm(
                total=total_steps,
                initial=completed_steps,
                desc="training",
                unit="step",
                bar_format=_BAR_FORMAT,
                leave=False,
                file=_ProgressBarFile(),
                ncols=self.width - 1,
                mininterval=0.2,
            )

    def count_step_and_update_bar(self) -> None:
        """Count one more step."""
        self._count_elapsed_time_and_switch_activity(TRAINING)
        self._steps.append(self._seconds.get(TRAINING, 0.0))
        self.shared_progress.count_step_and_record_duration()
        if self.bar is not None:
            self.bar.update()

    def register_forward_pass_hooks(self, module: Any, timer: object = None) -> None:
        """Mark where this module's forward passes begin and end, with `timer` on a GPU."""
        self.shared_progress.timer = timer
        module.register_forward_pre_hook(
            lambda *_: self.shared_progress.end_stage_and_begin_next(FORWARD)
        )
        module.register_forward_hook(
            lambda *_: self.shared_progress.end_stage_and_begin_next(BACKWARD)
        )

    def iterate_marking_read_time(self, batches: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the same batches, and mark the time in which each is read."""
        source = iter(batches)
        while True:
            self.shared_progress.end_stage_and_begin_next(READING)
            try:
                batch = next(source)
            except StopIteration:
                return
            self.shared_progress.end_stage_and_begin_next(PASSING)
            yield batch

    def show_loss_beside_bar(self, loss: float | None) -> None:
        """Show the newest known loss beside the bar."""
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}")

    @contextlib.contextmanager
    def show_activity_during(self, activity: str) -> Iterator[None]:
        """Show an activity while the context is open; then restore the bar."""
        previous_activity = self._activity
        self.begin_and_show_activity(activity)
        yield
        self._count_elapsed_time_and_switch_activity(previous_activity)
        self.shared_progress.begin_phase_and_count_progress(previous_activity)
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

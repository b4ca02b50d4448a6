"""What a run is doing now: how long each part took, and rank 0's live line, on a terminal only.

The line says what goes on before step 1, then how far the steps are.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ortlaunch.run_folder.folder import progress_width
from ortlaunch.worker.supervision.pulse import BACKWARD, FORWARD, PASSING, READING, TRAINING, Pulse
from ortlaunch.worker.supervision.terminal import LIVE

Batch = TypeVar("Batch")
_FORM = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress:
    """tqdm's line, handed to the guardian, which keeps it below all other output and out of the logs; and a clock."""

    def __init__(self, rank: int, pulse: Pulse | None = None) -> None:
        self.pulse = pulse or Pulse()
        self.width = progress_width() if rank == 0 else None
        self.bar: Any = None
        self._what = ""
        self._since = time.perf_counter()
        self._seconds = dict[str, float]()

    def seconds(self) -> dict[str, float]:
        """What each part took so far, in the order in which they began."""
        self._turn_to(self._what)
        return {what: round(seconds, 3) for what, seconds in self._seconds.items() if what}

    def _turn_to(self, what: str) -> None:
        """Time counts for this part from now on."""
        now = time.perf_counter()
        self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._since
        self._what = what
        self._since = now

    def doing(self, what: str) -> None:
        """Say what goes on now, in place of the bar if there is one."""
        self._turn_to(what)
        self.pulse.doing(what)
        if self.width is not None:
            _say(f"{what} ...")

    def tell(self, text: str) -> None:
        """How far it is with what goes on."""
        self.pulse.alive()
        if self.width is not None:
            _say(text)

    def begin(self, done: int, steps: int) -> None:
        """From here on steps are counted; `done` of them are."""
        self._turn_to(TRAINING)
        self.pulse.begin(done)
        if self.width is not None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread that would draw between our lines
            self.bar = tqdm(total=steps, initial=done, desc="training", unit="step", bar_format=_FORM, leave=False,
                            file=_ProgressBarFile(), ncols=self.width - 1, mininterval=0.2)  # fmt: skip

    def step(self) -> None:
        """One more."""
        self._turn_to(TRAINING)
        self.pulse.step()
        if self.bar is not None:
            self.bar.update()

    def watch(self, module: Any, timer: object = None) -> None:
        """Note where this module's forward passes begin and end; on a GPU, by a timer of its own."""
        self.pulse.timer = timer
        module.register_forward_pre_hook(lambda *_: self.pulse.at(FORWARD))
        module.register_forward_hook(lambda *_: self.pulse.at(BACKWARD))

    def reading(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, and that they are being read."""
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
        """The newest loss that is known, beside the bar."""
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}")

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say what goes on while open; then the bar is back."""
        before = self._what
        self.doing(what)
        yield
        self._turn_to(before)
        self.pulse.doing(before)
        if self.bar is not None:
            self.bar.refresh()


class _ProgressBarFile:
    """What tqdm takes for a file."""

    encoding = sys.stdout.encoding  # decides whether the bar is of blocks or of signs

    def write(self, text: str) -> None:
        shown = text.strip("\r\n ")
        if shown:
            _say(shown)

    def flush(self) -> None:
        """Each write is seen at once."""


def _say(text: str) -> None:
    sys.stdout.write(LIVE.decode() % text)
    sys.stdout.flush()

"""The live line of a run: what is going on before step 1, then how far the steps are. Rank 0's, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ortlaunch.run.folder import progress_width
from ortlaunch.worker.terminal import LIVE

_FORM = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress:
    """tqdm's line, handed to the guardian, which keeps it below all other output and out of the logs."""

    def __init__(self, rank: int) -> None:
        self.width = progress_width() if rank == 0 else None
        self.bar: Any = None

    def doing(self, what: str) -> None:
        """Say what goes on now, in place of the bar if there is one."""
        if self.width is not None:
            _say(f"{what} ...")

    def begin(self, done: int, steps: int) -> None:
        """From here on steps are counted; `done` of them are."""
        if self.width is not None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread that would draw between our lines
            self.bar = tqdm(total=steps, initial=done, desc="training", unit="step", bar_format=_FORM, leave=False,
                            file=_Line(), ncols=self.width - 1, mininterval=0.2)  # fmt: skip

    def step(self) -> None:
        """One more."""
        if self.bar is not None:
            self.bar.update()

    def show_loss(self, loss: float) -> None:
        """The newest loss that is known, beside the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}")

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say what goes on while open; then the bar is back."""
        self.doing(what)
        yield
        if self.bar is not None:
            self.bar.refresh()


class _Line:
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

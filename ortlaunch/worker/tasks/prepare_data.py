"""`ortlaunch data prepare`: put a recipe's data into the cache.

On a terminal one line shows the progress; elsewhere a line is printed every half minute.
"""

from __future__ import annotations

import sys
import time

from ortlaunch.recipe import parse_resolved
from ortlaunch.tasks import TASKS, DataRequest

_LINE_SECONDS = 30.0


def run(request: DataRequest) -> None:
    """Prepare a recipe's data, and print the numbers of samples."""
    recipe = parse_resolved(request.recipe)
    line = _Line()
    line.show("loading libraries")
    try:
        from ortlaunch.cache import cache_root, take_notes
        from ortlaunch.file_errors import of_ours
        from ortlaunch.worker.data import LoadedData

        with of_ours(cache_root()):
            data = LoadedData(recipe, line.show)
            data.read_for(TASKS["train"])
    finally:
        line.end()
    for note in take_notes():
        print(note)
    for name, samples in (("data.train", data.train), ("data.evaluation", data.evaluation)):
        if samples is not None:
            print(f"{name}: {len(samples):,} samples")
    for note in data.class_lines():
        print(note)
    print(f"ready in {cache_root()}")


class _Line:
    """The progress line, which is overwritten on a terminal."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.shown_at = time.monotonic()

    def show(self, text: str) -> None:
        """Show the progress."""
        if self.live:
            # Return to the start of the line, and clear it.
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown_at >= _LINE_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self.shown_at = time.monotonic()

    def end(self) -> None:
        """Remove the line from the terminal."""
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

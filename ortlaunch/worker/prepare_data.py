"""`python ortlaunch/start.py ortlaunch.worker.prepare_data < recipe.yaml`: a recipe's data into the cache.

On a terminal a line shows how far it is; elsewhere one is printed every half minute.
"""

from __future__ import annotations

import sys
import time

from ortlaunch.errors import OrtlaunchError
from ortlaunch.recipe import parse_resolved

_LINE_SECONDS = 30.0


def main() -> int:
    """Read a resolved recipe, make its data, say what there is; the exit status."""
    recipe, line = parse_resolved(sys.stdin.read()), _Line()
    line.show("loading libraries")
    try:
        from ortlaunch.cache import cache_root, take_notes
        from ortlaunch.file_errors import of_ours
        from ortlaunch.worker.data import Data

        with of_ours(cache_root()):
            data = Data(recipe, line.show)
            data.read_for("train")
    except OrtlaunchError as error:
        line.end()
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status
    line.end()
    for note in take_notes():
        print(note)
    for name, samples in (("data.train", data.train), ("data.evaluation", data.evaluation)):
        if samples is not None:
            print(f"{name}: {len(samples):,} samples")
    for note in data.class_lines():
        print(note)
    print(f"ready in {cache_root()}")
    return 0


class _Line:
    """One line that is written over and over on a terminal."""

    def __init__(self) -> None:
        self.live, self.shown_at = sys.stderr.isatty(), time.monotonic()

    def show(self, text: str) -> None:
        """How far it is."""
        if self.live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown_at >= _LINE_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self.shown_at = time.monotonic()

    def end(self) -> None:
        """Take the line away."""
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

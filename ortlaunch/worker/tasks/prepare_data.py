"""`ortlaunch data prepare`: put a recipe's data into the cache.

On a terminal one line shows the progress; elsewhere a line is printed every half minute.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ortlaunch.base.cache import cache_root_without_creating
from ortlaunch.recipe import Recipe, parse_resolved_recipe
from ortlaunch.tables.tasks import TASKS, DataRequest

if TYPE_CHECKING:
    from ortlaunch.worker.data import LoadedData

_LINE_SECONDS = 30.0


def run(request: DataRequest) -> None:
    """Prepare a recipe's data, and print the numbers of samples."""
    data, notes = cache_data_showing_progress_and_take_notes(parse_resolved_recipe(request.recipe))
    from ortlaunch.worker.data.mixture import streamed_sources_of_samples

    print(*notes, sep="\n", end="\n" if notes else "")
    for name, samples in data.parts.items():
        count = f"{len(samples):,} samples"
        print(f"{name}: {'is streamed' if streamed_sources_of_samples(samples) else count}")
    for note in data.class_lines():
        print(note)
    print(f"ready in {cache_root_without_creating()}")


def cache_data_showing_progress_and_take_notes(recipe: Recipe) -> tuple[LoadedData, list[str]]:
    """Return a recipe's data, which are then in the cache, and notes for the user."""
    line = _StderrProgress()
    line.show_or_print_at_intervals("loading libraries")
    try:
        from ortlaunch.base.cache import take_cache_notes
        from ortlaunch.base.file_errors import explain_errors_on_run_folder_or_cache_files
        from ortlaunch.worker.data import LoadedData

        with explain_errors_on_run_folder_or_cache_files(cache_root_without_creating()):
            data = LoadedData(recipe, line.show_or_print_at_intervals)
            data.read_samples_needed_by(TASKS["train"])
    finally:
        line.clear_line_on_terminal()
    return data, take_cache_notes()


class _StderrProgress:
    """The progress line, which is overwritten on a terminal."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.shown_at = time.monotonic()

    def show_or_print_at_intervals(self, progress_text: str) -> None:
        """Show the progress."""
        if self.is_terminal:
            # Return to the start of the line, and clear it.
            print(f"\r\x1b[K{progress_text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown_at >= _LINE_SECONDS:
            print(progress_text, file=sys.stderr, flush=True)
            self.shown_at = time.monotonic()

    def clear_line_on_terminal(self) -> None:
        """Remove the line from the terminal."""
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

"""The command's own output, which may be closed, full, or read by nobody. Standard library only.

What only prints ends there: with a line, or quietly where its reader has left (`| head`). What trains goes on: its logs
are in the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from ortlaunch.errors import FileError, printable

ERASE = "\r\x1b[K"  # of a live line; all else that a terminal would obey comes from a user's code, or from others


def terminal_width() -> int | None:
    """Columns of the terminal that the output goes to; None: it goes elsewhere, or to one that cannot erase."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return shutil.get_terminal_size().columns


class _Output:
    """A text stream that knows what to do where it cannot be written."""

    def __init__(self, stream: TextIO, name: str, goes_on: bool) -> None:
        self.stream = stream
        self.name = name
        self.goes_on = goes_on
        self.lost: Exception | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text if text == ERASE else printable(text)))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self.lost is None:
            try:
                act()
            except OSError as error:
                self._lose(error)
        if self.lost is not None and not self.goes_on:
            raise self.lost

    def _lose(self, error: OSError) -> None:
        """Nothing more can be written: what is buffered and what comes goes nowhere."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        told = f"{self.name}: {error.strerror}"
        self.lost = error if error.errno == errno.EPIPE else FileError(told, 1)
        if self.goes_on and self is sys.stdout:
            print(
                f"ortlaunch: {told}; the run goes on, its logs are in its folder", file=sys.stderr
            )


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Standard output and error for one command; errors that nobody can read end nothing."""
    _open_closed()
    before = sys.stdout, sys.stderr
    sys.stdout = _Output(sys.stdout, "standard output", goes_on=False)
    sys.stderr = _Output(sys.stderr, "standard error", goes_on=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def go_on_unread() -> None:
    """From here on work is done that must not end because nobody reads what it says."""
    if isinstance(sys.stdout, _Output):
        sys.stdout.goes_on = True


def _open_closed() -> None:
    """The null device for what is closed: else the next file that is opened would take its number, and be written."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False),
            )

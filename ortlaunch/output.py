"""Handle the command's own output, which may be closed, or go to a full disk or an ended reader.

A command that only prints ends then: with a message, or quietly if the reader has ended (`| head`).
A command that trains continues, because its logs are in the run folder. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from ortlaunch.errors import FileError, printable
from ortlaunch.units import COLUMNS, wrap_lines

# Erases the live line of a terminal. It is the only control sequence that ortlaunch itself prints;
# all others come from a user's code or from other programs.
ERASE = "\r\x1b[K"


def terminal_width() -> int | None:
    """Return the columns of the output's terminal; None if it is no terminal or cannot erase."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return shutil.get_terminal_size().columns


def output_columns() -> int:
    """Return the columns of the output's terminal, or COLUMNS if it is none."""
    return terminal_width() or COLUMNS


def print_lines(lines: Iterable[str]) -> None:
    """Print the lines, wrapped at the terminal's columns, without buffering."""
    columns = output_columns()
    for line in lines:
        print(wrap_lines(line, columns), flush=True)


class _Output:
    """A text stream that handles failed writes."""

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
        """Discard all output from now on, buffered text included, and report the loss once."""
        # The stream's descriptor itself is replaced, so that the buffer's flush at exit succeeds.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        told = f"{self.name}: {error.strerror}"
        self.lost = error if error.errno == errno.EPIPE else FileError(told, 1)
        if self.goes_on and self is sys.stdout:
            print(
                f"ortlaunch: {told}; the run continues, its logs are in its folder", file=sys.stderr
            )


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and standard error during one command; a lost stderr ends nothing."""
    _open_closed()
    before = sys.stdout, sys.stderr
    for stream in before:
        # Not a stream that a test or a notebook has put in its place.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = _Output(sys.stdout, "standard output", goes_on=False)
    sys.stderr = _Output(sys.stderr, "standard error", goes_on=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def go_on_unread() -> None:
    """Continue from now on if standard output is lost."""
    if isinstance(sys.stdout, _Output):
        sys.stdout.goes_on = True


def _open_closed() -> None:
    """Open the null device for closed standard streams."""
    # Otherwise the next file that is opened would get the stream's number, and output would be
    # written to it.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `open` returns the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False),
            )

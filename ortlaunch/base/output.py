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

from ortlaunch.base.errors import FileError, escape_control_characters
from ortlaunch.base.units import COLUMNS, wrap_long_lines_except_commands

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
        print(wrap_long_lines_except_commands(line, columns), flush=True)


class _LossTolerantStream:
    """A text stream that handles failed writes."""

    def __init__(self, stream: TextIO, name: str, continues_when_lost: bool) -> None:
        self.stream = stream
        self.name = name
        self.continues_when_lost = continues_when_lost
        self.lost_error: Exception | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._write_or_divert_to_null_and_raise_if_fatal(
            lambda: self.stream.write(text if text == ERASE else escape_control_characters(text))
        )
        return len(text)

    def flush(self) -> None:
        self._write_or_divert_to_null_and_raise_if_fatal(self.stream.flush)

    def _write_or_divert_to_null_and_raise_if_fatal(self, write_call: Callable[[], object]) -> None:
        if self.lost_error is None:
            try:
                write_call()
            except OSError as error:
                self._redirect_to_null_and_keep_and_print_error(error)
        if self.lost_error is not None and not self.continues_when_lost:
            raise self.lost_error

    def _redirect_to_null_and_keep_and_print_error(self, error: OSError) -> None:
        """Discard all output from now on, buffered text included, and report the loss once."""
        # The stream's descriptor itself is replaced, so that the buffer's flush at exit succeeds.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        message = f"{self.name}: {error.strerror}"
        self.lost_error = error if error.errno == errno.EPIPE else FileError(message, 1)
        if self.continues_when_lost and self is sys.stdout:
            print(
                f"ortlaunch: {message}; the run continues, its logs are in its folder",
                file=sys.stderr,
            )


@contextlib.contextmanager
def tolerate_lost_output_streams_within_block() -> Iterator[None]:
    """Guard standard output and standard error during one command; a lost stderr ends nothing."""
    _open_null_for_closed_standard_streams()
    original_streams = sys.stdout, sys.stderr
    for stream in original_streams:
        # Not a stream that a test or a notebook has put in its place.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = _LossTolerantStream(sys.stdout, "standard output", continues_when_lost=False)
    sys.stderr = _LossTolerantStream(sys.stderr, "standard error", continues_when_lost=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original_streams


def continue_without_output() -> None:
    """Continue from now on if standard output is lost."""
    if isinstance(sys.stdout, _LossTolerantStream):
        sys.stdout.continues_when_lost = True


def _open_null_for_closed_standard_streams() -> None:
    # Otherwise the next file that is opened would get the stream's number, and output would be
    # written to it.
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` returns the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False),
            )

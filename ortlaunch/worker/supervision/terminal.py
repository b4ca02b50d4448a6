"""Conversion of a rank's output into plain log lines, and into one live line on a terminal.

The live line stays below all other output. A rank marks it in its own output with an escape
sequence that terminals ignore and `Stream` removes. Standard library only: the supervisor starts
before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import NamedTuple

# An operating system command (OSC), which terminals do not show if they do not know it.
LIVE = b"\x1b]ortlaunch;%s\x07"
_LIVE = re.compile(rb"\x1b\]ortlaunch;([^\x07]*)\x07")
# Colours and other control sequences, links and titles, single escapes.
_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# Return to column 1 and erase to the end of the line.
_ERASE = b"\r\x1b[K"
# The end of a live line that has no clock of its own.
_WAIT_SUFFIX = b"..."
# Bytes. A longer line is not meant for a person, and is written in pieces.
_MAX_LINE_BYTES = 1 << 20


class LinesAndLiveLine(NamedTuple):
    """Whole plain lines, and the newest live line or None."""

    lines: bytes
    live: bytes | None


class OutputStream:
    """One output stream of a rank, which arrives in pieces."""

    def __init__(self) -> None:
        self.incomplete_line = b""

    def add_bytes_and_take_complete_and_live_lines(self, output_bytes: bytes) -> LinesAndLiveLine:
        """Add data, and return the lines that are complete now."""
        output_bytes = self.incomplete_line + output_bytes
        live_lines = _LIVE.findall(output_bytes)
        *complete_lines, self.incomplete_line = _LIVE.sub(b"", output_bytes).split(b"\n")
        if len(self.incomplete_line) > _MAX_LINE_BYTES:
            complete_lines = [*complete_lines, self.incomplete_line]
            self.incomplete_line = b""
        self.incomplete_line = _text_from_last_carriage_return_on(self.incomplete_line)
        return LinesAndLiveLine(
            b"".join(_line_without_control_codes(line) + b"\n" for line in complete_lines),
            live_lines[-1] if live_lines else None,
        )

    def take_unfinished_line(self) -> bytes:
        """Return a last line without a line break, and forget it."""
        line = _line_without_control_codes(self.incomplete_line)
        self.incomplete_line = b""
        return line + b"\n" if line else b""


def _line_without_control_codes(line: bytes) -> bytes:
    return _text_from_last_carriage_return_on(_CONTROL.sub(b"", line)).rstrip(b"\r").lstrip(b"\r")


def _text_from_last_carriage_return_on(line: bytes) -> bytes:
    """Return the last form of a line that was overwritten after carriage returns.

    A carriage return at its end has not overwritten anything yet.
    """
    start = line.rstrip(b"\r").rfind(b"\r")
    return line[max(0, start) :]


class Screen:
    """The terminal, if its `width` is known; else a file or a pipe, which gets lines unchanged."""

    def __init__(self, descriptors: dict[str, int], width: int | None) -> None:
        self.descriptors = descriptors
        self.width = width
        self.live_line = b""
        self.live_since = 0.0
        self.shown_seconds = 0

    def print_lines(self, stream_name: str, output_lines: bytes) -> None:
        """Print lines that stay, above the live line."""
        if output_lines and self.live_line:
            _write_ignoring_os_errors(self.descriptors["out"], _ERASE)
        if output_lines:
            _write_ignoring_os_errors(self.descriptors[stream_name], output_lines)
        if output_lines and self.live_line:
            self.draw_live_line_on_terminal(self.live_line)

    def draw_live_line_on_terminal(self, live_line: bytes) -> None:
        """Replace the live line."""
        if self.width is not None:
            if live_line != self.live_line:
                self.live_since = time.monotonic()
                self.shown_seconds = 0
            self.live_line = live_line
            waited_text = (
                f" {self.shown_seconds} s"
                if self.shown_seconds and live_line.endswith(_WAIT_SUFFIX)
                else ""
            )
            text = f"{live_line.decode(errors='replace')}{waited_text}"[
                : self._current_columns() - 1
            ]
            _write_ignoring_os_errors(self.descriptors["out"], _ERASE + text.encode())

    def update_waited_seconds_on_live_line(self) -> None:
        """Show how many seconds a wait has taken, as a sign of life; to be called often."""
        if self.live_line.endswith(_WAIT_SUFFIX) and self.shown_seconds < int(
            time.monotonic() - self.live_since
        ):
            self.shown_seconds = int(time.monotonic() - self.live_since)
            self.draw_live_line_on_terminal(self.live_line)

    def erase_live_line(self) -> None:
        """Remove the live line."""
        if self.live_line:
            _write_ignoring_os_errors(self.descriptors["out"], _ERASE)
            self.live_line = b""

    def _current_columns(self) -> int:
        """Return the terminal's columns now, because a window may be resized.

        Behind a launcher's pipe, the width is the one that the command read at its start.
        """
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.descriptors["out"]).columns or self.width or 80
        return self.width or 80


class PrefixedScreen(Screen):
    """The output of all ranks: each line begins with its rank's name; there is no live line."""

    def __init__(self, descriptors: dict[str, int], rank_name: str) -> None:
        super().__init__(descriptors, None)
        self._head = f"{rank_name}: ".encode()

    def print_lines(self, stream_name: str, output_lines: bytes) -> None:
        """Write all lines at once, because other ranks write to the same place."""
        if output_lines:
            _write_ignoring_os_errors(
                self.descriptors[stream_name],
                b"".join(self._head + line for line in output_lines.splitlines(keepends=True)),
            )


def _write_ignoring_os_errors(descriptor: int, data: bytes) -> None:
    # The reader of our output may be gone, and the run continues without it.
    with contextlib.suppress(OSError):
        os.write(descriptor, data)

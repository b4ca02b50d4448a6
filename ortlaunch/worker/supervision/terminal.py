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
_WAITS = b"..."
# Bytes. A longer line is not meant for a person, and is written in pieces.
_LONGEST = 1 << 20


class NewOutput(NamedTuple):
    """Whole plain lines, and the newest live line or None."""

    lines: bytes
    live: bytes | None


class Stream:
    """One output stream of a rank, which arrives in pieces."""

    def __init__(self) -> None:
        self.begun = b""

    def feed(self, data: bytes) -> NewOutput:
        """Add data, and return the lines that are complete now."""
        data = self.begun + data
        found = _LIVE.findall(data)
        *whole, self.begun = _LIVE.sub(b"", data).split(b"\n")
        if len(self.begun) > _LONGEST:
            whole = [*whole, self.begun]
            self.begun = b""
        self.begun = _last_drawn(self.begun)
        return NewOutput(
            b"".join(_plain(line) + b"\n" for line in whole), found[-1] if found else None
        )

    def rest(self) -> bytes:
        """Return a last line without a line break, and forget it."""
        line = _plain(self.begun)
        self.begun = b""
        return line + b"\n" if line else b""


def _plain(line: bytes) -> bytes:
    return _last_drawn(_CONTROL.sub(b"", line)).rstrip(b"\r").lstrip(b"\r")


def _last_drawn(line: bytes) -> bytes:
    """Return the last form of a line that was overwritten after carriage returns.

    A carriage return at its end has not overwritten anything yet.
    """
    start = line.rstrip(b"\r").rfind(b"\r")
    return line[max(0, start) :]


class Screen:
    """The terminal, if its `width` is known; else a file or a pipe, which gets lines unchanged."""

    def __init__(self, ends: dict[str, int], width: int | None) -> None:
        self.ends = ends
        self.width = width
        self.live = b""
        self.since = 0.0
        self.ticks = 0

    def show(self, name: str, lines: bytes) -> None:
        """Print lines that stay, above the live line."""
        if lines and self.live:
            _write(self.ends["out"], _ERASE)
        if lines:
            _write(self.ends[name], lines)
        if lines and self.live:
            self.draw(self.live)

    def draw(self, live: bytes) -> None:
        """Replace the live line."""
        if self.width is not None:
            if live != self.live:
                self.since = time.monotonic()
                self.ticks = 0
            self.live = live
            waited = f" {self.ticks} s" if self.ticks and live.endswith(_WAITS) else ""
            text = f"{live.decode(errors='replace')}{waited}"[: self._columns() - 1]
            _write(self.ends["out"], _ERASE + text.encode())

    def tick(self) -> None:
        """Show how many seconds a wait has taken, as a sign of life; to be called often."""
        if self.live.endswith(_WAITS) and self.ticks < int(time.monotonic() - self.since):
            self.ticks = int(time.monotonic() - self.since)
            self.draw(self.live)

    def close(self) -> None:
        """Remove the live line."""
        if self.live:
            _write(self.ends["out"], _ERASE)
            self.live = b""

    def _columns(self) -> int:
        """Return the terminal's columns now, because a window may be resized.

        Behind a launcher's pipe, the width is the one that the command read at its start.
        """
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.ends["out"]).columns or self.width or 80
        return self.width or 80


class Prefixed(Screen):
    """The output of all ranks: each line begins with its rank's name; there is no live line."""

    def __init__(self, ends: dict[str, int], name: str) -> None:
        super().__init__(ends, None)
        self._head = f"{name}: ".encode()

    def show(self, name: str, lines: bytes) -> None:
        """Write all lines at once, because other ranks write to the same place."""
        if lines:
            _write(
                self.ends[name],
                b"".join(self._head + line for line in lines.splitlines(keepends=True)),
            )


def _write(end: int, data: bytes) -> None:
    # The reader of our output may be gone, and the run continues without it.
    with contextlib.suppress(OSError):
        os.write(end, data)

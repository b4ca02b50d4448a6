"""What a rank's output becomes: plain lines for its logs, and on a terminal one live line that stays below them.

A rank names its live line in its own output, as a sequence that terminals and `Stream` know to leave out of the text.
Standard library only: the guardian is there before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import NamedTuple

LIVE = b"\x1b]ortlaunch;%s\x07"
_LIVE = re.compile(rb"\x1b\]ortlaunch;([^\x07]*)\x07")
# Colours and other control sequences, links and titles, single escapes.
_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_ERASE = b"\r\x1b[K"
_WAITS = b"..."  # at the end of a live line that has no clock of its own
_LONGEST = 1 << 20  # bytes: what is longer is no line for a person, and is written in pieces


class Taken(NamedTuple):
    """Whole plain lines, and the newest live line or None."""

    lines: bytes
    live: bytes | None


class Stream:
    """One of a rank's streams, which comes in pieces."""

    def __init__(self) -> None:
        self.begun = b""

    def take(self, data: bytes) -> Taken:
        """What is whole now."""
        data = self.begun + data
        found = _LIVE.findall(data)
        *whole, self.begun = _LIVE.sub(b"", data).split(b"\n")
        if len(self.begun) > _LONGEST:
            whole = [*whole, self.begun]
            self.begun = b""
        self.begun = _last_drawn(self.begun)
        return Taken(b"".join(_plain(line) + b"\n" for line in whole), found[-1] if found else None)

    def rest(self) -> bytes:
        """A last line that nobody ended."""
        line = _plain(self.begun)
        self.begun = b""
        return line + b"\n" if line else b""


def _plain(line: bytes) -> bytes:
    return _last_drawn(_CONTROL.sub(b"", line)).rstrip(b"\r").lstrip(b"\r")


def _last_drawn(line: bytes) -> bytes:
    """Of a line that was drawn over itself, the last form; a carriage return at its end draws nothing yet."""
    start = line.rstrip(b"\r").rfind(b"\r")
    return line[max(0, start) :]


class Screen:
    """The terminal, where `width` is known; else only what stands in its place, which lines go to as they are."""

    def __init__(self, ends: dict[str, int], width: int | None) -> None:
        self.ends = ends
        self.width = width
        self.live = b""
        self.since = 0.0
        self.ticks = 0

    def show(self, name: str, lines: bytes) -> None:
        """Lines that stay, above the live one."""
        if lines and self.live:
            _write(self.ends["out"], _ERASE)
        if lines:
            _write(self.ends[name], lines)
        if lines and self.live:
            self.draw(self.live)

    def draw(self, live: bytes) -> None:
        """Put this in the live line's place."""
        if self.width is not None:
            if live != self.live:
                self.since = time.monotonic()
                self.ticks = 0
            self.live = live
            waited = f" {self.ticks} s" if self.ticks and live.endswith(_WAITS) else ""
            text = f"{live.decode(errors='replace')}{waited}"[: self._columns() - 1]
            _write(self.ends["out"], _ERASE + text.encode())

    def tick(self) -> None:
        """Count the seconds of what is waited for, so that one sees that it lives; to be called often."""
        if self.live.endswith(_WAITS) and self.ticks < int(time.monotonic() - self.since):
            self.ticks = int(time.monotonic() - self.since)
            self.draw(self.live)

    def close(self) -> None:
        """Take the live line away."""
        if self.live:
            _write(self.ends["out"], _ERASE)
            self.live = b""

    def _columns(self) -> int:
        """Now, for a window may be made smaller; behind a launcher's pipe, as the command found it."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self.ends["out"]).columns or self.width or 80
        return self.width or 80


class Prefixed(Screen):
    """In its place where the output of all ranks is shown: each line behind its rank's name, and no live one."""

    def __init__(self, ends: dict[str, int], name: str) -> None:
        super().__init__(ends, None)
        self._head = f"{name}: ".encode()

    def show(self, name: str, lines: bytes) -> None:
        """In one piece, for others write there, too."""
        if lines:
            _write(
                self.ends[name],
                b"".join(self._head + line for line in lines.splitlines(keepends=True)),
            )


def _write(end: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader of our output may be gone; the run goes on
        os.write(end, data)

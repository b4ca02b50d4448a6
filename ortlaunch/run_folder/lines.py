"""Append to and read files of JSON lines in a run folder; unreadable lines are reported.

A process that is killed may leave half a line, and the next start writes after it. Standard
library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from ortlaunch.json_types import Json, fits, open_regular, parse_json, read_regular
from ortlaunch.run_folder.folder import json_text


class Lines(NamedTuple):
    """The JSON lines of a file, with a report of those left out."""

    found: list[Json]
    left_out: list[str]
    """A sentence for each line that cannot be read."""


def json_lines(path: Path, *names: str) -> Lines:
    """Return every readable line that has these keys."""
    lines = Lines([], [])
    # The piece after the last newline is dropped: a line that is still being written.
    data = read_regular(path) if path.exists() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        take_line(lines, f"{path.name}:{number}", line, *names)
    return lines


def json_tail(path: Path, size: int, *names: str) -> Lines:
    """Return the same for the lines in the last `size` bytes of a file."""
    with open_regular(path) as file:
        before = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(before)
        text = file.read()
        cut, mark, _ = text.partition(b"\n")
        # Where the first whole line begins; without `before` nothing is cut.
        begin = before + len(cut + mark) if before else 0
        lines = Lines([], [])
        for number, line in enumerate(text[begin - before :].split(b"\n")[:-1], 1):
            take_line(lines, f"{path.name}:{number}", line, *names)
        # Line numbers in the report count from the beginning of the file, so read it all.
        # Rare, so a second read of a large file is acceptable.
        if lines.left_out and begin:
            lines = json_lines(path, *names)
    return lines


def take_line(lines: Lines, place: str, line: bytes, *names: str) -> None:
    """Parse a line and add it to the lines found, or a sentence to those left out."""
    try:
        value = parse_json(line)
    except json.JSONDecodeError:
        lines.left_out.append(f"{place} is left out: no whole line of JSON")
        return
    absent = (
        [name for name in names if name not in value] if isinstance(value, dict) else ["mapping"]
    )
    if not absent and "step" in names and not fits(int, value["step"]):
        absent = ["step that is a number"]
    if absent:
        lines.left_out.append(f"{place} is left out: it has no {', '.join(absent)}")
    else:
        lines.found.append(value)


def append_line(path: Path, value: object) -> None:
    """Append a value as a JSON line, on a new line even after half a line of a killed process."""
    try:
        with path.open("ab+") as file:
            # The file does not end with a newline if the last writer was killed.
            cut = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write(b"\n" * cut + json_text(value).encode() + b"\n")
    except OSError as error:
        # A write to a full disk fails without a file's name.
        error.filename = str(path)
        raise

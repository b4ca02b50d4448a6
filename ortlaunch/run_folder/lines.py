"""Files of JSON lines in a run folder: a line is added whole, and what cannot be read is left out and told.

A process that is killed may leave half a line, and the next start writes after it. Standard library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import json_text


class Lines(NamedTuple):
    """JSON lines of a file."""

    found: list[Json]
    left_out: list[str]
    """A sentence for each line that cannot be read."""


def json_lines(path: Path, *names: str) -> Lines:
    """Every line that can be read and has these names; a last one that is still being written is none."""
    lines = Lines([], [])
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        take_line(lines, f"{path.name}:{number}", line, *names)
    return lines


def json_tail(path: Path, size: int, *names: str) -> Lines:
    """The same of the lines in the last so many bytes of a file."""
    with open(path, "rb") as file:
        before = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(before)
        text = file.read()
        cut, mark, _ = text.partition(b"\n")
        begin = before + len(cut + mark) if before else 0  # where the first whole line begins
        lines = Lines([], [])
        for number, line in enumerate(text[begin - before :].split(b"\n")[:-1], 1):
            take_line(lines, f"{path.name}:{number}", line, *names)
        if lines.left_out and begin:  # only then the file is read from its beginning, to count
            lines = json_lines(path, *names)
    return lines


def take_line(lines: Lines, place: str, line: bytes, *names: str) -> None:
    """Add one to what is read, or to what is left out."""
    try:
        value = json.loads(line)
    except ValueError:  # also where it is no text
        lines.left_out.append(f"{place} is left out: no whole line of JSON")
        return
    absent = (
        [name for name in names if name not in value] if isinstance(value, dict) else ["mapping"]
    )
    if not absent and "step" in names and type(value["step"]) is not int:
        absent = ["step that is a number"]
    if absent:
        lines.left_out.append(f"{place} is left out: it has no {', '.join(absent)}")
    else:
        lines.found.append(value)


def append_line(path: Path, value: object) -> None:
    """Add a JSON line; after half a one, of a process that was killed, on a line of its own."""
    with path.open("ab+") as file:
        cut = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * cut + json_text(value).encode() + b"\n")

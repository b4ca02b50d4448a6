"""Append to and read files of JSON lines in a run folder; unreadable lines are reported.

A process that is killed may leave half a line, and the next start writes after it. Standard
library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.json_types import (
    Json,
    open_regular_file_or_refuse,
    parse_json_or_raise_decode_error,
    read_regular_file_bytes_or_refuse,
    value_fits_annotation_at_any_depth,
)
from ortlaunch.run_folder.folder import json_text


class JsonLines(NamedTuple):
    """The JSON lines of a file, with a report of those left out."""

    values: list[Json]
    unreadable: list[str]
    """A sentence for each line that cannot be read."""


def read_json_lines_with_keys(file_path: Path, *required_keys: str) -> JsonLines:
    """Return every readable line that has these keys."""
    lines = JsonLines([], [])
    # The piece after the last newline is dropped: a line that is still being written.
    data = read_regular_file_bytes_or_refuse(file_path) if file_path.exists() else b""
    for line_number, line in enumerate(data.split(b"\n")[:-1], 1):
        _parse_line_into_values_or_unreadable(
            lines, f"{file_path.name}:{line_number}", line, *required_keys
        )
    return lines


def read_json_lines_in_tail_or_whole_if_damaged(
    file_path: Path, tail_bytes: int, *required_keys: str
) -> JsonLines:
    """Return the same for the lines in the last `tail_bytes` bytes of a file."""
    if not file_path.exists():
        return JsonLines([], [])
    with open_regular_file_or_refuse(file_path) as file:
        tail_offset = max(0, file.seek(0, os.SEEK_END) - tail_bytes)
        file.seek(tail_offset)
        text = file.read()
        cut, mark, _ = text.partition(b"\n")
        # Where the first whole line begins; without `before` nothing is cut.
        first_line_offset = tail_offset + len(cut + mark) if tail_offset else 0
        lines = JsonLines([], [])
        for line_number, line in enumerate(
            text[first_line_offset - tail_offset :].split(b"\n")[:-1], 1
        ):
            _parse_line_into_values_or_unreadable(
                lines, f"{file_path.name}:{line_number}", line, *required_keys
            )
        # Line numbers in the report count from the beginning of the file, so read it all.
        # Rare, so a second read of a large file is acceptable.
        if lines.unreadable and first_line_offset:
            lines = read_json_lines_with_keys(file_path, *required_keys)
    return lines


def _parse_line_into_values_or_unreadable(
    json_lines: JsonLines, line_location: str, line_bytes: bytes, *required_keys: str
) -> None:
    """Parse a line and add it to the lines found, or a sentence to those left out."""
    try:
        value = parse_json_or_raise_decode_error(line_bytes)
    except json.JSONDecodeError:
        json_lines.unreadable.append(f"{line_location} is left out: no whole line of JSON")
        return
    absent = (
        [name for name in required_keys if name not in value]
        if isinstance(value, dict)
        else ["mapping"]
    )
    if (
        not absent
        and "step" in required_keys
        and not value_fits_annotation_at_any_depth(int, value["step"])
    ):
        absent = ["step that is a number"]
    if absent:
        json_lines.unreadable.append(f"{line_location} is left out: it has no {', '.join(absent)}")
    else:
        json_lines.values.append(value)


def append_json_line(file_path: Path, json_value: object) -> None:
    """Append a value as a JSON line, on a new line even after half a line of a killed process."""
    try:
        with file_path.open("ab+") as file:
            # The file does not end with a newline if the last writer was killed.
            is_last_line_cut = (
                file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            )
            file.write(b"\n" * is_last_line_cut + json_text(json_value).encode() + b"\n")
    except OSError as error:
        # A write to a full disk fails without a file's name.
        error.filename = str(file_path)
        raise

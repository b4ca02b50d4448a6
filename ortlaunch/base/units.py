"""Format output for the user: counts, bytes, seconds, long lines. Standard library only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

# Columns of output that goes to no terminal.
COLUMNS = 100
_POWERS_OF_TWO = {"MiB": 20, "GiB": 30, "TiB": 40}
# A line that begins so ends in a command, which users copy as a whole.
COMMANDS = ("command: ", "to continue: ")


def count_with_noun(count: int, noun: str) -> str:
    """Return a number with a noun: `1 rank`, `2 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_names_and_count_of_rest(names: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return names as one text; of many the first ones, and how many more there are."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(map(str, names[:most])) + rest


def human_bytes(byte_count: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if byte_count < 1024:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1024
    return f"{byte_count:.1f} TiB"


def bytes_of_size_or_none(size_text: str) -> int | None:
    """Return the bytes of a size such as `80GiB`; None for another text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(MiB|GiB|TiB)", size_text)
    return match and int(float(match[1]) * (1 << _POWERS_OF_TWO[match[2]]))


def clock_duration(seconds: float) -> str:
    """Return seconds as `1:02:03` or `2:03`."""
    minutes, remaining_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{remaining_seconds:02}"
        if hours
        else f"{minutes}:{remaining_seconds:02}"
    )


def number_or_none(value: object) -> float | None:
    """Return the number in a record; None if the value is none."""
    # Records have inf and nan as strings, which float() accepts.
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def aligned_table_lines(
    rows: Iterable[Sequence[str]], right_aligns_after_first_column: bool = False
) -> list[str]:
    """Return the rows of a table as lines with aligned columns.

    Args:
        rows: the cells of each row.
        right_aligns_after_first_column: whether all columns but the first have their text at the right.
    """
    columns = [(column, max(map(len, column))) for column in zip(*rows)]
    padded_columns = [
        [
            cell.rjust(width) if right_aligns_after_first_column and index else cell.ljust(width)
            for cell in column
        ]
        for index, (column, width) in enumerate(columns)
    ]
    return ["  ".join(line).rstrip() for line in zip(*padded_columns)]


def wrap_long_lines_except_commands(text: str, columns: int = COLUMNS) -> str:
    """Return the text with its long lines wrapped at blanks.

    Lines that are continued have four more blanks at their start. Commands stay in one line, and so
    does a word that is longer.

    Args:
        text: one or more lines.
        columns: the largest length of a line.
    """
    return "\n".join(_wrap_line_unless_command(line, columns) for line in text.split("\n"))


def _wrap_line_unless_command(line: str, columns: int) -> str:
    start = line.lstrip()
    if len(line) <= columns or start.startswith(COMMANDS):
        return line
    indent = line[: len(line) - len(start)]
    return textwrap.fill(
        start,
        columns,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def shorten_to_one_line(text: str, most_characters: int) -> str:
    """Return a text as one line of at most `most_characters` characters, cut at a word, with ` ...`."""
    line = " ".join(text.split())
    # A word that is longer than the line is broken.
    return (
        line
        if len(line) <= most_characters
        else f"{textwrap.wrap(line, most_characters - 4)[0]} ..."
    )

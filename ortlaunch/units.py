"""Format output for the user: counts, bytes, seconds, long lines. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

# Columns of output that goes to no terminal.
COLUMNS = 100
# A line that begins so ends in a command, which users copy as a whole.
COMMANDS = ("command: ", "to continue: ")


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float) -> str:
    """Return seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: object) -> float | None:
    """Return the number in a record; None if the value is none."""
    # Records have inf and nan as strings, which float() accepts.
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def aligned(rows: Iterable[Sequence[str]], right: bool = False) -> list[str]:
    """Return the rows of a table as lines with aligned columns.

    Args:
        rows: the cells of each row.
        right: whether all columns but the first have their text at the right.
    """
    columns = [(column, max(map(len, column))) for column in zip(*rows)]
    placed = [
        [cell.rjust(width) if right and index else cell.ljust(width) for cell in column]
        for index, (column, width) in enumerate(columns)
    ]
    return ["  ".join(line).rstrip() for line in zip(*placed)]


def wrap_lines(text: str, columns: int = COLUMNS) -> str:
    """Return the text with its long lines wrapped at blanks.

    Lines that are continued have four more blanks at their start. Commands stay in one line, and so
    does a word that is longer.

    Args:
        text: one or more lines.
        columns: the largest length of a line.
    """
    return "\n".join(_wrap_line(line, columns) for line in text.split("\n"))


def _wrap_line(line: str, columns: int) -> str:
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


def shortened(text: str, width: int) -> str:
    """Return a text as one line of at most `width` characters, cut at a word, with ` ...`."""
    line = " ".join(text.split())
    # A word that is longer than the line is broken.
    return line if len(line) <= width else f"{textwrap.wrap(line, width - 4)[0]} ..."

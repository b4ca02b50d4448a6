"""Format numbers for the user: counts, bytes, seconds. Standard library only."""

from __future__ import annotations


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
    except (TypeError, ValueError):
        return None

"""The report of a problem in one line: its place in a file, its key, and the problem."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Key = str | int
KeyPath = tuple[Key, ...]
# (dotted paths involved, of which the first is reported; the message)
Problem = tuple[tuple[str, ...], str]
# Names whose values are never shown. pad_token and similar names are words of a tokenizer. The
# lookbehinds are two, because alternatives in one must have the same length.
SECRET = re.compile(
    r"((?<!PAD_|BOS_|EOS_|UNK_|SEP_|CLS_)(?<!MASK_)TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)


HIDDEN = "(not shown)"


def without_secrets(value: Any) -> Any:
    """Return plain values in which those of secret keys are replaced, for output to others."""
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if SECRET.search(str(k)) and item else without_secrets(item)
            for k, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


class Place(NamedTuple):
    """A place in the input: a file's line and column (from 1), or an override (no line)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class Line(NamedTuple):
    """One problem for the user: its place, and `key.path: problem; remedy`."""

    place: Place
    text: str

    def __str__(self) -> str:
        # A newline or an escape sequence in a key or a value must not break the report into pieces.
        return "".join(
            c if c.isprintable() else repr(c)[1:-1] for c in f"{self.place}: {self.text}"
        )


class SourceError(Exception):
    """Raised where a text cannot be read at all."""

    def __init__(self, place: Place, text: str) -> None:
        self.line = Line(place, text)
        super().__init__(str(self.line))


def in_reading_order(lines: Iterable[Line], first: str) -> list[Line]:
    """Return the lines file by file from the top, beginning with `first`; overrides come last."""
    in_files = [line for line in lines if line.place.line]
    in_files.sort(key=lambda line: (line.place.source != first, line.place))
    return in_files + [line for line in lines if not line.place.line]


def dotted(path: KeyPath) -> str:
    """Return a path as text: `("data", "train", "path", 0)` -> `data.train.path[0]`."""
    # An empty key is shown as ''; the first dot is cut off.
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key or repr(key)}" for key in path)[
        1:
    ]


def keys(path: str) -> KeyPath:
    """Return the path of a text: `data.train[0].weight` -> `("data", "train", 0, "weight")`."""
    return tuple(
        int(key[1:-1]) if key[0] == "[" else key for key in re.findall(r"[^.\[]+|\[[0-9]+\]", path)
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in a recipe; a list is one value."""
    # An empty mapping is a value, too, or it would be lost.
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value

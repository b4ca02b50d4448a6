"""How a problem is told: where it was written, which key it is about, and what is wrong, in one
line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Key = str | int
KeyPath = tuple[Key, ...]
Problem = tuple[
    tuple[str, ...], str
]  # dotted paths involved, the first is where it is reported; what is wrong
# Names whose values are never shown; pad_token and the like are words of a tokenizer.
SECRET = re.compile(
    r"((?<!PAD_|BOS_|EOS_|UNK_|SEP_|CLS_)(?<!MASK_)TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)


HIDDEN = "(not shown)"


def without_secrets(value: Any) -> Any:
    """Plain values without those of keys that name a secret, for what is passed on."""
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if SECRET.search(str(k)) and item else without_secrets(item)
            for k, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


class Place(NamedTuple):
    """Where something was written: a file's line and column (from 1), or an override (no line)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class Line(NamedTuple):
    """One problem for the user: its place, and `key.path: what is wrong; what would be right`."""

    place: Place
    text: str

    def __str__(self) -> str:
        # A newline or an escape sequence in a key or a value must not break the report into pieces.
        return "".join(
            c if c.isprintable() else repr(c)[1:-1] for c in f"{self.place}: {self.text}"
        )


class SourceError(Exception):
    """The text cannot be read at all."""

    def __init__(self, place: Place, text: str) -> None:
        self.line = Line(place, text)
        super().__init__(str(self.line))


def in_reading_order(lines: Iterable[Line], first: str) -> list[Line]:
    """File by file from the top, beginning with `first`, then the overrides."""
    in_files = [line for line in lines if line.place.line]
    in_files.sort(key=lambda line: (line.place.source != first, line.place))
    return in_files + [line for line in lines if not line.place.line]


def dotted(path: KeyPath) -> str:
    """`("data", "train", "path", 0)` -> `data.train.path[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key or repr(key)}" for key in path)[
        1:
    ]


def keys(path: str) -> KeyPath:
    """`data.train[0].weight` -> `("data", "train", 0, "weight")`."""
    return tuple(
        int(key[1:-1]) if key[0] == "[" else key for key in re.findall(r"[^.\[]+|\[[0-9]+\]", path)
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a recipe; a list is one value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value

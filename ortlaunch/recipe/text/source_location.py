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
SECRET_NAME = re.compile(
    r"((?<!PAD_|BOS_|EOS_|UNK_|SEP_|CLS_)(?<!MASK_)TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)


HIDDEN_VALUE = "(not shown)"


def values_with_hidden_secrets(value: Any) -> Any:
    """Return plain values in which those of secret keys are replaced, for output to others."""
    if isinstance(value, Mapping):
        return {
            k: HIDDEN_VALUE
            if SECRET_NAME.search(str(k)) and item
            else values_with_hidden_secrets(item)
            for k, item in value.items()
        }
    return (
        [values_with_hidden_secrets(item) for item in value] if isinstance(value, list) else value
    )


class SourceLocation(NamedTuple):
    """A place in the input: a file's line and column (from 1), or an override (no line)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class ProblemLine(NamedTuple):
    """One problem for the user: its place, and `key.path: problem; remedy`."""

    location: SourceLocation
    text: str

    def __str__(self) -> str:
        # A newline or an escape sequence in a key or a value must not break the report into pieces.
        return "".join(
            c if c.isprintable() else repr(c)[1:-1] for c in f"{self.location}: {self.text}"
        )


class SourceError(Exception):
    """Raised where a text cannot be read at all."""

    def __init__(self, location: SourceLocation, text: str) -> None:
        self.line = ProblemLine(location, text)
        super().__init__(str(self.line))


def sort_in_reading_order(
    problem_lines: Iterable[ProblemLine], first_source: str
) -> list[ProblemLine]:
    """Return the lines file by file from the top, beginning with `first_source`; overrides come last."""
    in_files = [line for line in problem_lines if line.location.line]
    in_files.sort(key=lambda line: (line.location.source != first_source, line.location))
    return in_files + [line for line in problem_lines if not line.location.line]


def format_key_path(key_path: KeyPath) -> str:
    """Return a path as text: `("data", "train", "path", 0)` -> `data.train.path[0]`."""
    # An empty key is shown as ''; the first dot is cut off.
    return "".join(
        f"[{key}]" if isinstance(key, int) else f".{key or repr(key)}" for key in key_path
    )[1:]


def parse_key_path(dotted_path: str) -> KeyPath:
    """Return the path of a text: `data.train[0].weight` -> `("data", "train", 0, "weight")`."""
    return tuple(
        int(key[1:-1]) if key[0] == "[" else key
        for key in re.findall(r"[^.\[]+|\[[0-9]+\]", dotted_path)
    )


def path_and_leaf_value_pairs(value: Any, dotted_path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in a recipe; a list is one value."""
    # An empty mapping is a value, too, or it would be lost.
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from path_and_leaf_value_pairs(
                item, f"{dotted_path}.{key}" if dotted_path else str(key)
            )
    else:
        yield dotted_path, value

"""Count how plainly the code is written, and fail above the limits.

    python tools/plain_words.py [FOLDER...]

For each folder: verbs of telling and the word "what" in docstrings and comments, per 1,000 words of
them; lines over 100 columns and statements that assign two unrelated values, as shares of all lines;
docstrings that begin with "What".
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TELLING = re.compile(
    r"\b(?:tell|tells|telling|told|say|says|saying|said|ask|asks|asking|asked)\b", re.I
)
WHAT = re.compile(r"\bwhat(?:ever)?\b", re.I)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
COLUMNS = 100  # ruff's line-length
FOLDERS = ("ortlaunch", "ortmodule/src", "ortmodule/tests", "tests", "tools", "benchmarks")


class Counts(NamedTuple):
    """The counts of one folder."""

    lines: int = 0
    words: int = 0
    telling: int = 0
    what: int = 0
    long: int = 0
    pairs: int = 0
    openings: int = 0
    """Docstrings that begin with "What"."""

    def __add__(self, other: tuple[int, ...]) -> Counts:  # type: ignore[override]
        return Counts(*(one + more for one, more in zip(self, other)))


class Limit(NamedTuple):
    """A rate with its upper limit."""

    name: str
    rate: float
    most: float

    @property
    def is_kept(self) -> bool:
        return self.rate <= self.most


def count(text: str) -> Counts:
    """Return the counts of a module."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = list(_docstrings(nodes))
    prose = " ".join((*docstrings, *_comments(text)))
    lines = text.splitlines()
    return Counts(
        lines=len(lines),
        words=len(WORD.findall(prose)),
        telling=len(TELLING.findall(prose)),
        what=len(WHAT.findall(prose)),
        long=sum(len(line) > COLUMNS for line in lines),
        pairs=sum(map(_is_pair, nodes)),
        openings=sum(text.startswith("What") for text in docstrings),
    )


def limits(counts: Counts) -> list[Limit]:
    """Return the rates of a folder with their limits."""
    # A folder without words or lines has no rates above 0.
    words = max(counts.words, 1) / 1000
    lines = max(counts.lines, 1)
    return [
        Limit("tell/say/ask per 1,000 words", counts.telling / words, 1),
        Limit("what per 1,000 words", counts.what / words, 3),
        Limit("over 100 columns, % of lines", 100 * counts.long / lines, 2),
        Limit("paired assignments per 1,000 lines", 1000 * counts.pairs / lines, 2),
        Limit('docstrings that begin with "What"', counts.openings, 0),
    ]


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Strings that are statements: of modules, classes, functions and fields."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#! ")


def _is_pair(node: ast.AST) -> bool:
    """Whether it assigns several values to as many names at once; an exchange of values is none."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    # Of `first = second = 1, 2` only the first target is checked.
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    names = {ast.unparse(one) for one in target.elts}
    return not any(
        ast.unparse(inner) in names for inner in ast.walk(node.value) if isinstance(inner, ast.expr)
    )


def main() -> int:
    """Print the table; return 1 where a limit is crossed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument(
        "--files", action="store_true", help="a line for each file, the worst first"
    )
    options = parser.parse_args()
    status = 0
    for folder in options.folders:
        paths = [Path(folder)] if Path(folder).is_file() else sorted(Path(folder).rglob("*.py"))
        found = {path: count(path.read_text()) for path in paths}
        total = sum(found.values(), Counts())
        if options.files:
            for path, counts in sorted(found.items(), key=lambda item: -sum(item[1][2:])):
                print(path, *(f"{name}={value}" for name, value in counts._asdict().items()))
        print(f"{folder}: {total.lines:,} lines, {total.words:,} words of docstrings and comments")
        for limit in limits(total):
            status |= not limit.is_kept
            mark = "" if limit.is_kept else f"  (limit {limit.most:g})"
            print(f"  {limit.name:40}{limit.rate:8.2f}{mark}")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Rules on the package's source: how often it uses `Any`, and what it never unpickles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "ortlaunch"
ORTMODULE = ROOT.parent / "ortmodule/src/ortmodule"


def names(text: str) -> int:
    """Return the number of uses of the name `Any`; imports do not count."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text))
    )


@pytest.mark.parametrize(("root", "limit"), [(ROOT, 10), (ORTMODULE, 40)])
def test_any_is_rare(root: Path, limit: int) -> None:
    """At most `limit` uses of Any occur in 1,000 lines.

    The limit of ortmodule is higher because it patches functions of untyped packages.
    """
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    found = {path: names(text) for path, text in texts.items()}
    lines = sum(text.count("\n") for text in texts.values())
    most = sorted(found, key=lambda path: -found[path])[:5]
    rate = 1000 * sum(found.values()) / lines
    assert rate <= limit, (
        f"{rate:.1f} of 1,000 lines; most in {[f'{path}: {found[path]}' for path in most]}"
    )


def test_imports_are_not_counted() -> None:
    """An import of Any is not counted as a use."""
    assert names("from typing import Any\nx: Any = 1\ny: dict[str, Any] = {}\n") == 2


def choices_in_place_of_if(text: str) -> list[int]:
    """Return the lines of `f() if x else g()` as a statement, and of `for ... in xs if x else ():`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp | ast.BoolOp))
        or (
            isinstance(node, ast.For)
            and isinstance(node.iter, ast.IfExp)
            and ast.unparse(node.iter.orelse) == "()"
        )
    ]


@pytest.mark.parametrize("room", [ROOT / "worker", ORTMODULE])
def test_a_choice_between_actions_is_an_if(room: Path) -> None:
    """No statement is a conditional expression, and no loop has one in place of an `if`."""
    found = {
        str(path): lines
        for path in room.rglob("*.py")
        if (lines := choices_in_place_of_if(path.read_text()))
    }
    assert found == {}


def test_how_choices_are_found() -> None:
    """Values may be conditional; statements and emptied loops may not."""
    text = (
        "x = f() if y else g()\nf() if y else None\ny and f()\nfor z in x if y else ():\n    f(z)\n"
    )
    assert choices_in_place_of_if(text) == [2, 3, 4]


def test_no_rank_unpickles_what_another_sends() -> None:
    """The package uses none of torch's collectives of objects: they run the sender's code."""
    found = [
        path
        for path in ROOT.rglob("*.py")
        if re.search(r"(gather|cast|scatter|send|recv)_object|pickle\.loads?\(", path.read_text())
    ]
    assert found == []

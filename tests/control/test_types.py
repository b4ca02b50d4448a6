"""The number of uses of `Any` in the package, where the type checker checks nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "ortlaunch"


def names(text: str) -> int:
    """Return the number of uses of the name `Any`; imports do not count."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text))
    )


@pytest.mark.parametrize(
    ("inside", "limit"), [(False, 10), (True, 40)], ids=["outside ortmodule", "ortmodule"]
)
def test_any_is_rare(inside: bool, limit: int) -> None:
    """At most `limit` uses of Any occur in 1,000 lines.

    The limit of ortmodule is higher because it patches functions of untyped packages.
    """
    texts = {
        path: path.read_text()
        for path in ROOT.rglob("*.py")
        if ("ortmodule" in path.relative_to(ROOT).parts) == inside
    }
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

"""A recipe file -> a valid, frozen Recipe, or all that is wrong with it at once.

`load` is the one way in. May import the standard library, pydantic and yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Union

import yaml

from ortlaunch.errors import RecipeError
from ortlaunch.recipe.check import check, dotted
from ortlaunch.recipe.models import Recipe
from ortlaunch.recipe.rules import Problem, broken
from ortlaunch.recipe.source import KeyPath, SourceError, Tree, override, read

__all__ = ["Recipe", "RecipeFile", "load", "parse_resolved", "to_yaml"]


class RecipeFile:
    """A valid recipe together with where each of its keys was written."""

    def __init__(self, recipe: Recipe, tree: Tree) -> None:
        self.recipe, self._tree = recipe, tree

    def explain(self, problem: Problem) -> str:
        """A rule's problem as a line with its place."""
        return _line(self._tree, *_located(self._tree, problem))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RecipeFile:
    """Read a recipe, what it extends, and `key.path=value` overrides.

    Raises:
        RecipeError: with every problem, each as `file:line:column: key.path: what; what would be right`.
    """
    problems: list[str] = []
    try:
        tree = override(read(Path(path), problems), overrides, problems)
    except SourceError as error:
        raise RecipeError([*problems, error.problem]) from None
    recipe, wrong = check(tree)
    if recipe is not None:
        wrong += _rules(recipe, tree, [path for path, _ in wrong])
    lines = problems + [_line(tree, *item) for item in sorted(wrong, key=lambda item: tree.where(item[0]))]
    if lines or recipe is None:
        raise RecipeError(lines)
    return RecipeFile(recipe, tree)


def _rules(recipe: Recipe, tree: Tree, wrong: Sequence[KeyPath]) -> list[tuple[KeyPath, str]]:
    """Broken rules, but for those that speak of a key that was wrong itself and was taken out."""
    found = []
    for problem in broken(recipe):
        involved = [_keys(path) for path in problem[0]]
        if not any(_overlap(path, bad) for path in involved for bad in wrong):
            found.append(_located(tree, problem))
    return found


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _located(tree: Tree, problem: Problem) -> tuple[KeyPath, str]:
    return _keys(problem[0][0]), problem[1]


def _keys(path: str) -> KeyPath:
    return tuple(path.split("."))


def _line(tree: Tree, path: KeyPath, message: str) -> str:
    return f"{tree.where(path)}: {dotted(path)}: {message}" if path else f"{tree.place}: {message}"


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe: every field with its value, in order."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    return text


def parse_resolved(text: str) -> Recipe:
    """A recipe that `to_yaml` wrote."""
    return Recipe.model_validate(yaml.safe_load(text))

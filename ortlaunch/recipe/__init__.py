"""Load a recipe file as a valid, frozen Recipe, or report all its errors at once.

`load` is the only entry point. May import the standard library, pydantic and yaml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from ortlaunch.errors import DamagedFile, RecipeError
from ortlaunch.json_types import read_regular
from ortlaunch.recipe.check import check
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.space import space_problems
from ortlaunch.recipe.text.paths import expand_paths
from ortlaunch.recipe.text.place import Line, Problem, SourceError, in_reading_order, keys
from ortlaunch.recipe.text.source import override, read, read_values
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import dump, load_dumped

__all__ = [
    "Recipe",
    "RecipeFile",
    "load",
    "load_values",
    "parse_resolved",
    "read_resolved",
    "to_yaml",
]


class RecipeFile:
    """A valid recipe, with the place of each of its keys and the tree that was read for it."""

    def __init__(
        self,
        recipe: Recipe,
        tree: Tree,
        read: Tree,
        overrides: tuple[str, ...],
        notes: Sequence[str] = (),
        absolute: bool = False,
    ) -> None:
        self.recipe = recipe
        self.overrides = overrides
        self.notes = tuple(notes)
        """The folders that relative paths of the recipe start from, where there is a choice."""
        self._tree = tree
        # The tree before overrides: further overrides start from it.
        self._read = read
        self._absolute = absolute

    def with_overrides(self, *overrides: str) -> RecipeFile:
        """Return the recipe with further `key.path=value`; no file is read again.

        Raises: RecipeError: with every problem, as `load`.
        """
        return _checked(self._read, (*self.overrides, *overrides), [], self._absolute)

    def with_absolute_paths(self) -> RecipeFile:
        """Return the recipe with absolute paths of the inputs that exist on this host."""
        return _checked(self._read, self.overrides, [], absolute=True)

    def explain(self, problem: Problem) -> str:
        """Return a rule's problem as a line with its place."""
        paths, message = problem
        return str(Line(self._tree.where(keys(paths[0])), f"{paths[0]}: {message}"))

    def require(self, problems: Iterable[Problem]) -> None:
        """Raise RecipeError with the lines of all problems, if there are any."""
        if lines := [self.explain(problem) for problem in problems]:
            raise RecipeError(lines)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RecipeFile:
    """Read a recipe, the recipes that it extends, and `key.path=value` overrides.

    Raises: RecipeError: with every problem, each as `file:line:column: key.path: problem; remedy`.
    """
    return _loaded(lambda problems: read(Path(path), problems), overrides)


def load_values(values: Mapping[str, object], overrides: Sequence[str] = ()) -> RecipeFile:
    """Return the recipe of a mapping in Python, as `load` does for a file."""
    return _loaded(lambda problems: read_values(values, problems), overrides)


def _loaded(reader: Callable[[list[Line]], Tree], overrides: Sequence[str]) -> RecipeFile:
    problems: list[Line] = []
    try:
        tree = reader(problems)
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    return _checked(tree, tuple(overrides), problems)


def _checked(
    read: Tree, overrides: tuple[str, ...], problems: list[Line], absolute: bool = False
) -> RecipeFile:
    """Return the recipe of a tree and overrides; `problems` are those found while reading."""
    whole, notes = expand_paths(override(read, overrides, problems), os.environ, absolute)
    recipe, tree, wrong = check(whole)
    problems += wrong
    if recipe is not None and recipe.sweep is not None and not problems:
        problems = space_problems(tree, recipe.sweep)
    if problems or recipe is None:
        raise RecipeError([str(line) for line in in_reading_order(problems, read.place.source)])
    return RecipeFile(recipe, tree, read, overrides, notes, absolute)


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: every field with its value, in order."""
    return dump(recipe.model_dump(mode="json"))


def parse_resolved(text: str) -> Recipe:
    """Return the recipe of a text that `to_yaml` wrote."""
    return Recipe.model_validate(load_dumped(text))


def read_resolved(path: Path) -> Recipe:
    """Return the recipe of a run's folder.

    Raises: DamagedFile: the file is no recipe.
    """
    try:
        return parse_resolved(read_regular(path).decode())
    except ValidationError as error:
        # The first error is enough: a person did not write this file.
        where = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
        why = f"{where}: {error.errors()[0]['msg']}"
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
    raise DamagedFile(
        f"{path}: is not a recipe, is damaged, or is of another version of ortlaunch ({why})"
    )

"""Load a recipe file as a valid, frozen Recipe, or report all its errors at once.

`load` is the only entry point. May import the standard library, pydantic and yaml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from ortlaunch.base.errors import DamagedFile, RecipeError
from ortlaunch.base.json_types import read_regular_file_bytes_or_refuse
from ortlaunch.recipe.check import check_tree_and_drop_wrong_values
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.space import problem_lines_of_search_values_or_first_bad_combination
from ortlaunch.recipe.text.paths import expand_input_paths_and_note_folders
from ortlaunch.recipe.text.source import (
    read_recipe_tree_with_bases,
    tree_of_python_values,
    tree_with_overrides_or_problems,
)
from ortlaunch.recipe.text.source_location import (
    Problem,
    ProblemLine,
    SourceError,
    parse_key_path,
    sort_in_reading_order,
)
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import dump_yaml, load_dumped

__all__ = [
    "Recipe",
    "RecipeFile",
    "dump_recipe_yaml",
    "load_recipe",
    "load_recipe_values",
    "parse_resolved_recipe",
    "read_resolved_recipe_of_run",
]


class RecipeFile:
    """A valid recipe, with the place of each of its keys and the tree that was read for it."""

    def __init__(
        self,
        recipe: Recipe,
        tree: Tree,
        tree_before_overrides: Tree,
        overrides: tuple[str, ...],
        notes: Sequence[str] = (),
        paths_are_absolute: bool = False,
    ) -> None:
        self.recipe = recipe
        self.overrides = overrides
        self.notes = tuple(notes)
        """The folders that relative paths of the recipe start from, where there is a choice."""
        self._tree = tree
        # The tree before overrides: further overrides start from it.
        self._tree_before_overrides = tree_before_overrides
        self._paths_are_absolute = paths_are_absolute

    def copy_with_further_overrides(self, *overrides: str) -> RecipeFile:
        """Return the recipe with further `key.path=value`; no file is read again.

        Raises: RecipeError: with every problem, as `load`.
        """
        return _apply_overrides_and_check_recipe(
            self._tree_before_overrides, (*self.overrides, *overrides), [], self._paths_are_absolute
        )

    def make_paths_absolute(self) -> RecipeFile:
        """Return the recipe with absolute paths of the inputs that exist on this host."""
        return _apply_overrides_and_check_recipe(
            self._tree_before_overrides, self.overrides, [], paths_are_absolute=True
        )

    def located_problem_line(self, problem: Problem) -> str:
        """Return a rule's problem as a line with its place."""
        paths, message = problem
        return str(
            ProblemLine(
                self._tree.nearest_key_location(parse_key_path(paths[0])), f"{paths[0]}: {message}"
            )
        )

    def raise_if_problems(self, problems: Iterable[Problem]) -> None:
        """Raise RecipeError with the lines of all problems, if there are any."""
        if lines := [self.located_problem_line(problem) for problem in problems]:
            raise RecipeError(lines)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RecipeFile:
    """Read a recipe, the recipes that it extends, and `key.path=value` overrides.

    Raises: RecipeError: with every problem, each as `file:line:column: key.path: problem; remedy`.
    """
    return _read_tree_and_check_recipe(
        lambda problems: read_recipe_tree_with_bases(Path(path), problems), overrides
    )


def load_recipe_values(values: Mapping[str, object], overrides: Sequence[str] = ()) -> RecipeFile:
    """Return the recipe of a mapping in Python, as `load` does for a file."""
    return _read_tree_and_check_recipe(
        lambda problems: tree_of_python_values(values, problems), overrides
    )


def _read_tree_and_check_recipe(
    read_tree: Callable[[list[ProblemLine]], Tree], overrides: Sequence[str]
) -> RecipeFile:
    problems: list[ProblemLine] = []
    try:
        tree = read_tree(problems)
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    return _apply_overrides_and_check_recipe(tree, tuple(overrides), problems)


def _apply_overrides_and_check_recipe(
    tree_before_overrides: Tree,
    overrides: tuple[str, ...],
    problems: list[ProblemLine],
    paths_are_absolute: bool = False,
) -> RecipeFile:
    """Return the recipe of a tree and overrides; `problems` are those found while reading."""
    expanded_tree, notes = expand_input_paths_and_note_folders(
        tree_with_overrides_or_problems(tree_before_overrides, overrides, problems),
        os.environ,
        paths_are_absolute,
    )
    recipe, tree, check_problems = check_tree_and_drop_wrong_values(expanded_tree)
    problems += check_problems
    if recipe is not None and recipe.sweep is not None and not problems:
        problems = problem_lines_of_search_values_or_first_bad_combination(tree, recipe.sweep)
    if problems or recipe is None:
        raise RecipeError(
            [
                str(line)
                for line in sort_in_reading_order(problems, tree_before_overrides.location.source)
            ]
        )
    return RecipeFile(recipe, tree, tree_before_overrides, overrides, notes, paths_are_absolute)


def dump_recipe_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: every field with its value, in order."""
    return dump_yaml(recipe.model_dump(mode="json"))


def parse_resolved_recipe(text: str) -> Recipe:
    """Return the recipe of a text that `to_yaml` wrote."""
    return Recipe.model_validate(load_dumped(text))


def read_resolved_recipe_of_run(path: Path) -> Recipe:
    """Return the recipe of a run's folder.

    Raises: DamagedFile: the file is no recipe.
    """
    try:
        return parse_resolved_recipe(read_regular_file_bytes_or_refuse(path).decode())
    except ValidationError as error:
        # The first error is enough: a person did not write this file.
        key_text = ".".join(map(str, error.errors()[0]["loc"])) or "all of it"
        reason = f"{key_text}: {error.errors()[0]['msg']}"
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
    raise DamagedFile(
        f"{path}: is not a recipe, is damaged, or is of another version of ortlaunch ({reason})"
    )

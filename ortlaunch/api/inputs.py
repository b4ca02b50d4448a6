"""Load and validate a recipe, from a file or a mapping."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe
from ortlaunch.base.errors import RecipeError
from ortlaunch.base.machine import visible_gpu_count
from ortlaunch.recipe import Recipe, RecipeFile, inputs
from ortlaunch.recipe.rules.rules import precision_and_engine_device_rules
from ortlaunch.recipe.text.python_values import json_value_or_importable_name_or_add_problem
from ortlaunch.recipe.text.source_location import parse_key_path
from ortlaunch.resolve.shipped import recipe_path_or_shipped_recipe
from ortlaunch.user_modules import unloadable_factory_problems

RecipeSource = str | os.PathLike[str] | Mapping[str, object] | Recipe
"""A recipe: a YAML file, the name of a shipped one, a mapping, or a loaded recipe."""


class LoadedRecipe(NamedTuple):
    """A recipe with its origin."""

    file: RecipeFile
    given_path: Path
    """The path as given."""
    path: Path
    """The file; of a mapping or a loaded recipe, a path in the folder of the user's modules."""
    overrides: tuple[str, ...]
    is_file: bool


class Validation(NamedTuple):
    """A valid recipe, with notes on what may be a mistake."""

    recipe: Recipe
    path: Path
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text that `ortlaunch validate` prints."""
        is_auto = self.recipe.engine.name == "auto"
        auto = "; engine auto: measured when training starts" if is_auto else ""
        return "\n".join([f"{self.path}: valid ({self.recipe.name}{auto})", *self.notes])


def load(source: RecipeSource, *assignments: str, **overrides: object) -> Recipe:
    """Load a recipe.

    Args:
        source: a YAML file, the name of a shipped recipe, a mapping, or a loaded recipe.
        assignments: `key.path=value`, as on the command line.
        overrides: fields of the recipe. A mapping sets the keys of a section:
            `train={"max_steps": 100}`. Each value replaces the old one.

    Returns:
        The recipe with all defaults; it is frozen.

    Raises:
        RecipeError: with every problem of the recipe at once.
    """
    loaded = load_recipe_with_path_and_overrides(source, assignments, overrides)
    loaded.file.recipe._folder = str(loaded.path.parent)
    return loaded.file.recipe


def validate(
    source: RecipeSource, *assignments: str, elsewhere: bool = False, **overrides: object
) -> Validation:
    """Check a recipe, and the files and functions that it names.

    Args:
        source, assignments, overrides: as in `load`.
        elsewhere: whether another machine trains: missing files are then notes, as they are with
            `launch.nodes` above 1.

    Raises:
        RecipeError: with every problem at once.
    """
    loaded = load_recipe_with_path_and_overrides(source, assignments, overrides)
    file, folder = loaded.file, loaded.path.parent
    # These need the disk; `load` has checked everything that the text alone shows.
    missing_problems = (
        *inputs.absent_or_lfs_pointer_input_problems(file.recipe),
        *unloadable_factory_problems(file.recipe, folder),
    )
    content_problems = (
        *inputs.column_and_vocabulary_problems(file.recipe),
        *inputs.model_type_unknown_to_library_problems(file.recipe),
    )
    lines = [
        file.located_problem_line(problem) for problem in (*missing_problems, *content_problems)
    ]
    # With several nodes this machine may only submit the run, so missing files are notes.
    if lines and not elsewhere and file.recipe.launch.nodes in (None, 1):
        remedy = "if they exist on the machine that trains: ortlaunch validate --elsewhere"
        raise RecipeError([*lines, *([remedy] if missing_problems else [])])
    # Notes only: the recipe may be right.
    lines += [
        *map(
            file.located_problem_line,
            inputs.repeated_file_and_high_learning_rate_problems(file.recipe),
        ),
        *file.notes,
        *file.recipe.sweep_lines(),
    ]
    # Often a login node, so that this is a note, too.
    device = file.recipe.launch.device
    local_device = (
        ("cuda" if visible_gpu_count(os.environ) else "cpu") if device == "auto" else device
    )
    lines += [
        f"a training on this host ends with: {file.located_problem_line(problem)}"
        for problem in precision_and_engine_device_rules(file.recipe, local_device)
    ]
    return Validation(file.recipe, loaded.path, tuple(lines))


def load_recipe_with_path_and_overrides(
    source: RecipeSource, assignments: Sequence[str], overrides: Mapping[str, object]
) -> LoadedRecipe:
    """Return a recipe with its origin; arguments and errors are those of `load`."""
    all_assignments = (*assignments, *dotted_assignments_from_section_overrides(overrides))
    if isinstance(source, (str, os.PathLike)):
        given_path = Path(source)
        path = recipe_path_or_shipped_recipe(given_path)
        return LoadedRecipe(
            recipe.load_recipe(path, all_assignments), given_path, path, all_assignments, True
        )
    path = Path("recipe")
    values: Mapping[str, object]
    if isinstance(source, Recipe):
        # The rules are checked again: `model_copy` checks nothing.
        values = source.model_dump(mode="json")
        path = Path(source._folder, "recipe")
    else:
        values = source
    return LoadedRecipe(
        recipe.load_recipe_values(values, all_assignments), path, path, all_assignments, False
    )


def dotted_assignments_from_section_overrides(overrides: Mapping[str, object]) -> Iterator[str]:
    """Yield `key.path=value` for each field of the overrides of `load`.

    Raises:
        RecipeError: at the end, with every value that no recipe can have.
    """
    problems: list[str] = []
    for key, value in overrides.items():
        fields = value if isinstance(value, Mapping) and value else {"": value}
        for name, item in fields.items():
            path = f"{key}.{name}".rstrip(".")
            json_value = json_value_or_importable_name_or_add_problem(
                item, parse_key_path(path), problems
            )
            yield f"{path}={json.dumps(json_value)}"
    if problems:
        raise RecipeError([f"override {problem}" for problem in problems])

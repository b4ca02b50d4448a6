"""Validate a tree as a Recipe, and report pydantic's errors and broken rules with their places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import LIST, MAPPING, NUMBER, PART, WORD
from ortlaunch.recipe.hints.messages import missing_key_message, wrong_value_message
from ortlaunch.recipe.hints.unknown_keys import report_and_move_or_drop_unknown_keys
from ortlaunch.recipe.rules.rules import broken_rule_problems
from ortlaunch.recipe.text.source_location import (
    KeyPath,
    ProblemLine,
    format_key_path,
    parse_key_path,
)
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import parse_yaml_tree

# Stand-ins for missing required values, so that the rules can still check the rest. Rules that
# involve such a key are not reported.
_PLACEHOLDERS: dict[KeyPath, str] = {
    ("name",): "x",
    ("model",): "{task: custom}",
    ("model", "task"): "custom",
    ("data",): "{train: python-docs}",
    ("data", "train"): "python-docs",
    ("data", "train", "format"): "custom",
    ("data", "evaluation", "format"): "custom",
    ("data", "tokenizer", "train"): "bpe",
    ("batch",): "{}",
    ("optimizer",): "{learning_rate: 1.0}",
    ("optimizer", "learning_rate"): "1.0",
    ("train",): "{max_steps: 1}",
    ("train", "max_steps"): "1",
    ("train", "stop_after", "evaluations"): "1",
}


class CheckedRecipe(NamedTuple):
    """The recipe, or None; its tree without wrong values; and all problems."""

    recipe: Recipe | None
    tree: Tree
    problems: list[ProblemLine]


def check_tree_and_drop_wrong_values(tree: Tree) -> CheckedRecipe:
    """Check the names of keys, then values, then the rules across fields."""
    tree, problems, doubtful_paths = report_and_move_or_drop_unknown_keys(tree)
    recipe = None
    # Removing a wrong key can uncover another error. The limit ends a loop that makes no progress.
    for _ in range(4):
        try:
            recipe = Recipe.model_validate(tree.value_without_locations())
            break
        except ValidationError as error:
            errors_by_path = [
                (_key_path_without_union_branches(details, tree), details)
                for details in error.errors()
            ]
        # Paths in `doubtful` were reported already, or are the targets of unknown keys.
        for path, details in errors_by_path:
            # Where `extends` is misspelt, no base was read, and its values are missing.
            is_missing_base_key = details["type"] == "missing" and ("extends",) in doubtful_paths
            if path not in doubtful_paths and not is_missing_base_key:
                problems.append(
                    ProblemLine(
                        tree.nearest_key_location(path),
                        f"{format_key_path(path)}: {_missing_or_wrong_value_message(path, details, tree)}",
                    )
                )
            doubtful_paths.append(path)
        for path, _details in errors_by_path:
            tree = _tree_with_placeholder_or_without_value(tree, path)
    # Without its base most of the recipe is a placeholder: rules would report nonsense.
    if recipe is not None and ("extends",) not in doubtful_paths:
        problems += _broken_rule_lines_of_valid_keys(recipe, tree, doubtful_paths)
    return CheckedRecipe(recipe, tree, problems)


def _key_path_without_union_branches(error_details: ErrorDetails, tree: Tree) -> KeyPath:
    """Return pydantic's location without the names of union branches."""
    path: KeyPath = ()
    for key in error_details["loc"]:
        node = tree.find_subtree(path)
        if key in (MAPPING, WORD, LIST, NUMBER, PART):
            continue
        if node is not None and node.node_type == "scalar":
            # A single value may stand for a list: `path: 3` has no `path[0]` in the file.
            break
        path = (*path, key)
    if error_details["type"] == "missing" and isinstance(path[-1], int):
        # One number where a pair is required: the error is about the pair.
        return path[:-1]
    return path


def _missing_or_wrong_value_message(
    key_path: KeyPath, error_details: ErrorDetails, tree: Tree
) -> str:
    value_node = tree.find_subtree(key_path)
    return (
        missing_key_message(key_path)
        if error_details["type"] == "missing" and value_node is None
        else wrong_value_message(key_path, error_details, value_node)
    )


def _tree_with_placeholder_or_without_value(tree: Tree, key_path: KeyPath) -> Tree:
    # A list with a wrong item is removed as a whole.
    key_path = tuple(itertools.takewhile(lambda key: isinstance(key, str), key_path))
    if key_path in _PLACEHOLDERS:
        return tree.copy_with_subtree(key_path, parse_yaml_tree(_PLACEHOLDERS[key_path], "", []))
    # A space without its wrong fields would be another one.
    return tree.remove_key(key_path[:1] if key_path[0] == "sweep" else key_path)


def _broken_rule_lines_of_valid_keys(
    recipe: Recipe, tree: Tree, doubtful_paths: Sequence[KeyPath]
) -> Iterator[ProblemLine]:
    """Yield the problems of broken rules, except those about a key that was itself wrong."""
    for key_names, message in broken_rule_problems(recipe):
        involved_paths = [parse_key_path(path) for path in key_names]
        if not any(
            _is_same_or_nested(path, doubtful_path)
            for path in involved_paths
            for doubtful_path in doubtful_paths
        ):
            yield ProblemLine(
                tree.nearest_key_location(involved_paths[0]), f"{key_names[0]}: {message}"
            )


def _is_same_or_nested(key_path: KeyPath, other_path: KeyPath) -> bool:
    # A section overlaps with its own keys.
    shorter = min(len(key_path), len(other_path))
    return key_path[:shorter] == other_path[:shorter]

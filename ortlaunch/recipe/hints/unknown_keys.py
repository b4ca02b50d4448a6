"""Unknown keys: each is reported with advice.

did_you_mean.py chooses the key that was meant. The value is moved to it, so that it is checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import BaseModel

from ortlaunch.recipe.fields.field_lookup import (
    accepts_null,
    find_field,
    first_model_at_path,
    is_required,
    item_models_in_annotation,
    section_models_in_annotation,
)
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.hints.did_you_mean import Advice, advise_on_unknown_key
from ortlaunch.recipe.text.source_location import KeyPath, ProblemLine, format_key_path
from ortlaunch.recipe.text.tree import Tree

# A file with more unknown keys is no recipe: the rest is reported as one line.
_MAX_REPORTED = 100


class KnownKeys(NamedTuple):
    """A tree of known keys only, the problems, and the keys that unknown keys were meant for."""

    tree: Tree
    problems: list[ProblemLine]
    doubtful_paths: list[KeyPath]


def report_and_move_or_drop_unknown_keys(tree: Tree) -> KnownKeys:
    """Remove unknown keys from the tree, or move them to the key that was meant."""
    problems: list[ProblemLine] = []
    doubtful_paths: list[KeyPath] = []
    unknown_path = next(_unknown_key_paths(tree), None)
    while unknown_path is not None and len(problems) < _MAX_REPORTED:
        advice = advise_on_unknown_key(str(unknown_path[-1]), unknown_path[:-1])
        problems.append(
            ProblemLine(
                tree.nearest_key_location(unknown_path),
                f"{format_key_path(unknown_path)}: unknown key; {advice.text}",
            )
        )
        tree = _tree_with_key_moved_or_dropped(tree, unknown_path, advice)
        # The value was not moved to its target, so the target's own errors would mislead.
        if advice.target_path and not (advice.is_certain and tree.find_subtree(advice.target_path)):
            doubtful_paths.append(advice.target_path)
        # What a mapping lacks may be what its unknown key was meant for.
        parent = tree.find_subtree(unknown_path[:-1])
        if parent is not None and not parent.children:
            doubtful_paths.append(unknown_path[:-1])
        unknown_path = next(_unknown_key_paths(tree), None)
    if unknown_path is not None:
        unknown_count = sum(1 for _ in _unknown_key_paths(tree))
        problems.append(
            ProblemLine(
                tree.nearest_key_location(unknown_path),
                f"{format_key_path(unknown_path)}: unknown key, like {unknown_count - 1} more; is this a recipe?",
            )
        )
        tree = replace(tree, children={})
        # Suppresses errors about missing keys: they may be among the removed ones.
        doubtful_paths.append(("extends",))
    return KnownKeys(_tree_without_nulls_of_optional_keys(tree), problems, doubtful_paths)


def _unknown_key_paths(
    tree: Tree, section_types: Sequence[type[BaseModel]] = (Recipe,), section_path: KeyPath = ()
) -> Iterator[KeyPath]:
    for key, child in tree.children.items():
        field = find_field(section_types, key)
        if field is None:
            yield (*section_path, key)
            continue
        inner_models = [*section_models_in_annotation(field.annotation)]
        if child.node_type == "mapping" and inner_models:
            yield from _unknown_key_paths(child, inner_models, (*section_path, key))
        models_of_items = [*item_models_in_annotation(field.annotation)]
        for item_index, item in (
            child.children.items()
            if models_of_items and not (inner_models and child.node_type == "mapping")
            else ()
        ):
            yield from (
                _unknown_key_paths(item, models_of_items, (*section_path, key, item_index))
                if item.node_type == "mapping"
                else ()
            )


def _tree_with_key_moved_or_dropped(tree: Tree, unknown_path: KeyPath, advice: Advice) -> Tree:
    value = tree.find_subtree(unknown_path)
    remaining_tree = tree.remove_key(unknown_path)
    target = advice.target_path
    if (
        value is None
        or target is None
        or not advice.is_certain
        or remaining_tree.find_subtree(target) is not None
    ):
        return remaining_tree
    # A section on the path may be a plain value in the file, which would be overwritten.
    sections_on_path = (remaining_tree.find_subtree(target[:end]) for end in range(1, len(target)))
    can_be_moved = all(
        section is None or section.node_type == "mapping" for section in sections_on_path
    )
    return (
        remaining_tree.copy_with_subtree(target, value)
        if can_be_moved and target != ("extends",)
        else remaining_tree
    )


def _tree_without_nulls_of_optional_keys(tree: Tree, section_path: KeyPath = ()) -> Tree:
    """Return the tree without nulls of keys that have a default and do not accept null.

    Such a key was left empty, or unset by an override.
    """
    for key, child in tree.children.items():
        child_path = (*section_path, key)
        if child.node_type == "scalar" and child.scalar is None:
            if (
                first_model_at_path(section_path)
                and not accepts_null(child_path)
                and not is_required(child_path)
            ):
                tree = tree.remove_key((key,))
        elif first_model_at_path(child_path) and child.node_type == "mapping":
            tree = tree.copy_with_subtree(
                (key,), _tree_without_nulls_of_optional_keys(child, child_path)
            )
    return tree

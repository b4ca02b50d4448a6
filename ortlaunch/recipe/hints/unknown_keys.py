"""Unknown keys: each is reported with advice.

did_you_mean.py chooses the key that was meant. The value is moved to it, so that it is checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import BaseModel

from ortlaunch.recipe.fields.field_lookup import (
    field_of,
    is_required,
    items_in,
    models_in,
    section_at,
    takes_null,
)
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.hints.did_you_mean import Advice, advise
from ortlaunch.recipe.text.place import KeyPath, Line, dotted
from ortlaunch.recipe.text.tree import Tree

# A file with more unknown keys is no recipe: the rest is reported as one line.
_MOST = 100


class KnownKeys(NamedTuple):
    """A tree of known keys only, the problems, and the keys that unknown keys were meant for."""

    tree: Tree
    problems: list[Line]
    doubtful: list[KeyPath]


def settle(tree: Tree) -> KnownKeys:
    """Remove unknown keys from the tree, or move them to the key that was meant."""
    problems: list[Line] = []
    doubtful: list[KeyPath] = []
    path = next(_unknown(tree), None)
    while path is not None and len(problems) < _MOST:
        advice = advise(str(path[-1]), path[:-1])
        problems.append(Line(tree.where(path), f"{dotted(path)}: unknown key; {advice.text}"))
        tree = _moved(tree, path, advice)
        # The value was not moved to its target, so the target's own errors would mislead.
        if advice.target and not (advice.sure and tree.find(advice.target)):
            doubtful.append(advice.target)
        path = next(_unknown(tree), None)
    if path is not None:
        more = sum(1 for _ in _unknown(tree))
        problems.append(
            Line(
                tree.where(path),
                f"{dotted(path)}: unknown key, like {more - 1} more; is this a recipe?",
            )
        )
        tree = replace(tree, children={})
        # Suppresses errors about missing keys: they may be among the removed ones.
        doubtful.append(("extends",))
    return KnownKeys(_without_empty(tree), problems, doubtful)


def _unknown(
    tree: Tree, models: Sequence[type[BaseModel]] = (Recipe,), path: KeyPath = ()
) -> Iterator[KeyPath]:
    for key, child in tree.children.items():
        info = field_of(models, key)
        if info is None:
            yield (*path, key)
            continue
        sections = [*models_in(info.annotation)]
        if child.kind == "mapping" and sections:
            yield from _unknown(child, sections, (*path, key))
        items = [*items_in(info.annotation)]
        for number, item in (
            child.children.items() if items and not (sections and child.kind == "mapping") else ()
        ):
            yield from (
                _unknown(item, items, (*path, key, number)) if item.kind == "mapping" else ()
            )


def _moved(tree: Tree, path: KeyPath, advice: Advice) -> Tree:
    value = tree.find(path)
    rest = tree.without(path)
    target = advice.target
    if value is None or target is None or not advice.sure or rest.find(target) is not None:
        return rest
    # A section on the path may be a plain value in the file, which would be overwritten.
    on_the_way = (rest.find(target[:end]) for end in range(1, len(target)))
    free = all(section is None or section.kind == "mapping" for section in on_the_way)
    return rest.put(target, value) if free and target != ("extends",) else rest


def _without_empty(tree: Tree, path: KeyPath = ()) -> Tree:
    """Return the tree without nulls of keys that have a default and do not accept null.

    Such a key was left empty, or unset by an override.
    """
    for key, child in tree.children.items():
        below = (*path, key)
        if child.kind == "scalar" and child.scalar is None:
            if section_at(path) and not takes_null(below) and not is_required(below):
                tree = tree.without((key,))
        elif section_at(below) and child.kind == "mapping":
            tree = tree.put((key,), _without_empty(child, below))
    return tree

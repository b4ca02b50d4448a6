"""Validate a tree as a Recipe, and report pydantic's errors and broken rules with their places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import LIST, MAPPING, NUMBER, PART, WORD
from ortlaunch.recipe.hints.messages import missing, wrong
from ortlaunch.recipe.hints.unknown_keys import settle
from ortlaunch.recipe.rules.rules import broken
from ortlaunch.recipe.text.place import KeyPath, Line, dotted, keys
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import parse

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


class Checked(NamedTuple):
    """The recipe, or None; its tree without wrong values; and all problems."""

    recipe: Recipe | None
    tree: Tree
    problems: list[Line]


def check(tree: Tree) -> Checked:
    """Check the names of keys, then values, then the rules across fields."""
    tree, problems, doubtful = settle(tree)
    recipe = None
    # Removing a wrong key can uncover another error. The limit ends a loop that makes no progress.
    for _ in range(4):
        try:
            recipe = Recipe.model_validate(tree.plain())
            break
        except ValidationError as error:
            found = [(_path(details, tree), details) for details in error.errors()]
        # Paths in `doubtful` were reported already, or are the targets of unknown keys.
        for path, details in found:
            # Where `extends` is misspelt, no base was read, and its values are missing.
            of_base = details["type"] == "missing" and ("extends",) in doubtful
            if path not in doubtful and not of_base:
                problems.append(
                    Line(tree.where(path), f"{dotted(path)}: {_message(path, details, tree)}")
                )
            doubtful.append(path)
        for path, _details in found:
            tree = _mended(tree, path)
    # Without its base most of the recipe is a placeholder: rules would report nonsense.
    if recipe is not None and ("extends",) not in doubtful:
        problems += _rules(recipe, tree, doubtful)
    return Checked(recipe, tree, problems)


def _path(details: ErrorDetails, tree: Tree) -> KeyPath:
    """Return pydantic's location without the names of union branches."""
    path: KeyPath = ()
    for key in details["loc"]:
        here = tree.find(path)
        if key in (MAPPING, WORD, LIST, NUMBER, PART):
            continue
        if here is not None and here.kind == "scalar":
            # A single value may stand for a list: `path: 3` has no `path[0]` in the file.
            break
        path = (*path, key)
    if details["type"] == "missing" and isinstance(path[-1], int):
        # One number where a pair is required: the error is about the pair.
        return path[:-1]
    return path


def _message(path: KeyPath, details: ErrorDetails, tree: Tree) -> str:
    written = tree.find(path)
    return (
        missing(path)
        if details["type"] == "missing" and written is None
        else wrong(path, details, written)
    )


def _mended(tree: Tree, path: KeyPath) -> Tree:
    """Return the tree without a wrong value, or with a placeholder where a value is required."""
    # A list with a wrong item is removed as a whole.
    path = tuple(itertools.takewhile(lambda key: isinstance(key, str), path))
    if path in _PLACEHOLDERS:
        return tree.put(path, parse(_PLACEHOLDERS[path], "", []))
    # A space without its wrong fields would be another one.
    return tree.without(path[:1] if path[0] == "sweep" else path)


def _rules(recipe: Recipe, tree: Tree, doubtful: Sequence[KeyPath]) -> Iterator[Line]:
    """Yield the problems of broken rules, except those about a key that was itself wrong."""
    for paths, message in broken(recipe):
        involved = [keys(path) for path in paths]
        if not any(_overlap(path, other) for path in involved for other in doubtful):
            yield Line(tree.where(involved[0]), f"{paths[0]}: {message}")


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    # A section overlaps with its own keys.
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]

"""Tree -> Recipe: pydantic finds what is wrong, this says where it was written and goes on with the
rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ortlaunch.recipe.fields.models import Recipe
from ortlaunch.recipe.fields.section import LIST, MAPPING, NUMBER, WORD
from ortlaunch.recipe.hints.messages import missing, wrong
from ortlaunch.recipe.hints.names import settle
from ortlaunch.recipe.rules.rules import broken
from ortlaunch.recipe.text.place import KeyPath, Line, dotted, keys
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import parse

# Stand in for what is missing, so that the rules can still look at the rest.
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
    """The recipe, or what is left of it; its tree; and all that is wrong."""

    recipe: Recipe | None
    tree: Tree
    problems: list[Line]


def check(tree: Tree) -> Checked:
    """Ask for known names, then for right values, then for what fits together."""
    tree, problems, doubtful = settle(tree)
    recipe = None
    for _ in range(4):  # a key taken out can uncover one more error, never an endless row
        try:
            recipe = Recipe.model_validate(tree.plain())
            break
        except ValidationError as error:
            found = [(_path(details, tree), details) for details in error.errors()]
        for path, details in found:
            if path not in doubtful and not _without_its_base(details, doubtful):
                problems.append(
                    Line(tree.where(path), f"{dotted(path)}: {_message(path, details, tree)}")
                )
            doubtful.append(path)
        for path, _details in found:
            tree = _mended(tree, path)
    if recipe is not None and ("extends",) not in doubtful:
        problems += _rules(recipe, tree, doubtful)
    return Checked(recipe, tree, problems)


def _path(details: ErrorDetails, tree: Tree) -> KeyPath:
    """pydantic's location without the names of union branches."""
    path: KeyPath = ()
    for key in details["loc"]:
        here = tree.find(path)
        if key in (MAPPING, WORD, LIST, NUMBER):
            continue
        if here is not None and here.kind == "scalar":
            break  # `path: 3` is one value that may also be a list
        path = (*path, key)
    if details["type"] == "missing" and isinstance(path[-1], int):
        return path[:-1]  # one number where a pair is wanted: speak of the pair
    return path


def _message(path: KeyPath, details: ErrorDetails, tree: Tree) -> str:
    written = tree.find(path)
    return (
        missing(path)
        if details["type"] == "missing" and written is None
        else wrong(path, details, written)
    )


def _without_its_base(details: ErrorDetails, doubtful: Sequence[KeyPath]) -> bool:
    """A misspelt `extends`: everything that the base would give is missing now."""
    return details["type"] == "missing" and ("extends",) in doubtful


def _mended(tree: Tree, path: KeyPath) -> Tree:
    """The tree with a wrong value taken out, or stood in for where something must be there."""
    path = tuple(
        itertools.takewhile(lambda key: isinstance(key, str), path)
    )  # a list is wrong as a whole
    if path in _PLACEHOLDERS:
        return tree.put(path, parse(_PLACEHOLDERS[path], "", []))
    return tree.without(path)


def _rules(recipe: Recipe, tree: Tree, doubtful: Sequence[KeyPath]) -> list[Line]:
    """Broken rules, but for those that speak of a key that was wrong itself and was taken out."""
    found = []
    for paths, message in broken(recipe):
        involved = [keys(path) for path in paths]
        if not any(_overlap(path, other) for path in involved for other in doubtful):
            found.append(Line(tree.where(involved[0]), f"{paths[0]}: {message}"))
    return found


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]

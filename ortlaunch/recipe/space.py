"""Check the space of a sweep: every field and value of it must make a valid recipe."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping

from ortlaunch.recipe.check import check
from ortlaunch.recipe.fields.sweep import Search, combinations
from ortlaunch.recipe.text.place import Line
from ortlaunch.recipe.text.source import override
from ortlaunch.recipe.text.tree import Tree

# Combinations of values that are checked together; each check takes some milliseconds.
_MOST = 64


def assignments(fields: Mapping[str, object]) -> list[str]:
    """Return the overrides of a trial: its values, and no sweep."""
    return ["sweep=null", *(f"{name}={json.dumps(value)}" for name, value in fields.items())]


def space_problems(tree: Tree, search: Search) -> list[Line]:
    """Return the problems of values in the space, else of the first bad combination of them."""
    found = list(_single(tree, search))
    together = combinations([*search.space.items()], lambda one: one.ends, {})
    for fields in itertools.islice(together, 0 if found else _MOST):
        if texts := _texts(tree, fields):
            values = ", ".join(assignments(fields)[1:])
            place = tree.where(("sweep", "space"))
            return [Line(place, f"sweep.space: {text} (with {values})") for text in texts]
    return found


def _single(tree: Tree, search: Search) -> Iterator[Line]:
    before = dict[str, tuple[object, ...]]()
    for name, parameter in search.space.items():
        path = ("sweep", "space", name)
        for other, value in parameter.when.items():
            if value not in before.get(other, ()):
                why = "is no value of a field that the space has before this one"
                place = tree.where((*path, "when", other))
                yield Line(place, f"sweep.space.{name}.when: {other}: {json.dumps(value)} {why}")
        before[name] = parameter.ends
        if name.startswith("sweep"):
            yield Line(tree.where(path), f"sweep.space.{name}: cannot be searched; remove it")
            continue
        seen = set[str]()
        for number, value in enumerate(parameter.ends):
            place = tree.where((*path, parameter.kind, number))
            texts = [
                text for text in _texts(tree, {**parameter.when, name: value}) if text not in seen
            ]
            seen.update(texts)
            yield from (
                Line(place, f"sweep.space.{name}: {json.dumps(value)}: {text}") for text in texts
            )


def _texts(tree: Tree, fields: Mapping[str, object]) -> list[str]:
    """Return the problems of the recipe with these values, without their places."""
    problems = list[Line]()
    problems += check(override(tree, assignments(fields), problems)).problems
    return [line.text for line in problems]

"""Find the modules of a recipe's factories: installed, beside the recipe or in the current folder.

A folder of the user is added to the path only if it has such a module, and at the end. So other
files in it replace no installed package.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path

from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe

_FACTORIES = (
    "model.factory",
    "train.hook",
    "train.metric",
    "optimizer.attributes",
    "engine.postprocess",
    "data.collate",
)


def make_importable(recipe: Recipe, beside: Path) -> None:
    """Add the folders of the recipe's factories to the path.

    Raises:
        InputError: an installed module has the name of a module of the user, and would replace it.
    """
    for folder in folders(recipe, beside):
        # At the end, so that an installed package always comes first.
        if folder not in sys.path:
            sys.path.append(folder)


def folders(recipe: Recipe, beside: Path) -> Iterator[str]:
    """Yield the user's folders that have modules of the recipe's factories.

    Raises:
        InputError: an installed module has the name of a module of the user.
    """
    for key, factory in factories(recipe):
        # Of `package.module:function` only the top-level name is searched for.
        name = factory.partition(":")[0].partition(".")[0]
        folder, mine = _users_own(name, (beside, Path.cwd()))
        installed = _file(importlib.util.find_spec(name))
        if mine is None or (installed and _same(installed, mine)):
            continue
        if installed:
            raise InputError(
                f"{key}: {factory!r} is {installed}, which is imported before your {mine}; "
                "rename your module"
            )
        yield folder


def factories(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield key and `module:function` of every factory."""
    for key in _FACTORIES:
        if factory := attrgetter(key)(recipe):
            yield key, factory
    for key, source in recipe.data.sources():
        if not isinstance(source, str) and source.factory:
            yield f"{key}.factory", source.factory


def _users_own(name: str, places: tuple[Path, ...]) -> tuple[str, str | None]:
    """Return the first folder that has the module, and the module's file; ("", None) if none has.

    A package without __init__.py has a folder instead of a file.
    """
    for folder in map(os.path.abspath, places):
        spec = PathFinder.find_spec(name, [folder])
        if spec:
            return folder, _file(spec) or next(iter(spec.submodule_search_locations or ()))
    return "", None


def _file(spec: ModuleSpec | None) -> str | None:
    """Return a module's file, or `built-in`; None without a module or for a namespace package."""
    return spec.origin if spec else None


def _same(one: str, other: str) -> bool:
    # A package that is installed in editable mode is the user's own file.
    return os.path.realpath(one) == os.path.realpath(other)

"""Find the modules of a recipe's factories: installed, beside the recipe or in the current folder.

A folder of the user is added to the path only if it has such a module, and at the end. So other
files in it replace no installed package. A check before a start reads the user's code and never
runs it: a module is located without an import, and a function in its source.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.inputs import current_folder_for_message
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.recipe.text.source_location import Problem

_FACTORIES = (
    "model.factory",
    "train.hook",
    "train.metric",
    "optimizer.attributes",
    "engine.postprocess",
    "data.collate",
)


# With one of these a module may have names that its source does not show.
_HIDDEN = ("globals(", "__getattr__", "exec(", "setattr(", "import *", "vars(", "locals(")


def append_factory_folders_to_sys_path(recipe: Recipe, recipe_folder: Path) -> None:
    """Add the folders of the recipe's factories to the path.

    Raises:
        InputError: an installed module has the name of a module of the user, and would replace it.
    """
    for folder in uninstalled_factory_module_folders_or_refuse(recipe, recipe_folder):
        # At the end, so that an installed package always comes first.
        if folder not in sys.path:
            sys.path.append(folder)


def uninstalled_factory_module_folders_or_refuse(
    recipe: Recipe, recipe_folder: Path
) -> Iterator[str]:
    """Yield the user's folders that have modules of the recipe's factories.

    Raises:
        InputError: an installed module has the name of a module of the user.
    """
    for key, factory in key_and_factory_pairs(recipe):
        # Of `package.module:function` only the top-level name is searched for.
        name = factory.partition(":")[0].partition(".")[0]
        folder, user_file = _find_user_module_folder_and_file(name, (recipe_folder, Path.cwd()))
        installed_file = _module_file(importlib.util.find_spec(name))
        # A package that is installed in editable mode is the user's own file.
        if user_file is None or (
            installed_file and os.path.realpath(installed_file) == os.path.realpath(user_file)
        ):
            continue
        if installed_file:
            raise InputError(
                f"{key}: {factory!r} is {installed_file}, which is imported before your {user_file}; "
                "rename your module"
            )
        yield folder


def key_and_factory_pairs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield key and `module:function` of every factory."""
    for key in _FACTORIES:
        if factory := attrgetter(key)(recipe):
            yield key, factory
    for key, source in recipe.data.key_and_source_pairs():
        if not isinstance(source, str) and source.factory:
            yield f"{key}.factory", source.factory


def unloadable_factory_problems(recipe: Recipe, recipe_folder: Path) -> Iterator[Problem]:
    """Yield functions of the user that no rank could load on this host.

    Raises:
        InputError: an installed module has the name of one of the user's.
    """
    search_folders = list(uninstalled_factory_module_folders_or_refuse(recipe, recipe_folder))
    for key, factory in key_and_factory_pairs(recipe):
        module, _, function = factory.partition(":")
        spec = _find_module_spec_without_importing_or_none(module, search_folders)
        if spec is None:
            yield (
                (key,),
                f"got {factory}; no module {module} beside the recipe, in {current_folder_for_message()} or installed",
            )
        # A compiled module has no source to check.
        elif spec.origin and spec.origin.endswith(".py"):
            reason = _reason_file_lacks_function(function, Path(spec.origin))
            if reason:
                yield (key,), f"got {factory}; {reason}"


def _find_user_module_folder_and_file(
    module_name: str, search_folders: tuple[Path, ...]
) -> tuple[str, str | None]:
    """Return the first folder that has the module, and the module's file; ("", None) if none has.

    A package without __init__.py has a folder instead of a file.
    """
    for folder in map(os.path.abspath, search_folders):
        if spec := PathFinder.find_spec(module_name, [folder]):
            return folder, _module_file(spec) or next(iter(spec.submodule_search_locations or ()))
    return "", None


def _module_file(spec: ModuleSpec | None) -> str | None:
    """Return a module's file, or `built-in`; None without a module or for a namespace package."""
    return spec.origin if spec else None


def _find_module_spec_without_importing_or_none(
    module_name: str, search_folders: Sequence[str]
) -> ModuleSpec | None:
    """Return the location from which a rank would import a module."""
    # `importlib.util.find_spec` alone would import the parents of a submodule.
    top_name, *submodule_names = module_name.split(".")
    with contextlib.suppress(ValueError, ImportError):
        spec = importlib.util.find_spec(top_name) or PathFinder.find_spec(top_name, search_folders)
        name = top_name
        for part in submodule_names:
            # A module such as os.path is no file in a package: only an import can locate it.
            if spec is None or spec.submodule_search_locations is None:
                return spec and ModuleSpec(module_name, None)
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec
    return None


def _reason_file_lacks_function(function_name: str, module_path: Path) -> str | None:
    """Return why the module's file cannot have the function, as far as its source shows."""
    try:
        source = module_path.read_bytes()
        with warnings.catch_warnings():
            # Warnings on the user's code belong to the run.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError as error:
        return f"{module_path}:{error.lineno}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"{module_path} cannot be read: {error}"
    names = set(_names_bound_at_module_level(tree.body))
    if function_name in names or any(word.encode() in source for word in _HIDDEN):
        return None
    guess = closest_or_translated_name_or_none(function_name, names)
    return f"{module_path} has no {function_name}" + (f"; did you mean {guess}?" if guess else "")


def _names_bound_at_module_level(module_body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield names that a module's statements bind, also inside `if`, `try`, `with` and loops."""
    for statement in module_body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # Not walked: names inside a function or class are not the module's.
            yield statement.name
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name

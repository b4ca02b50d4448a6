"""Where the user's own modules are looked for, and who wins over a module of the same name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ortlaunch.base.errors import InputError
from ortlaunch.user_modules import append_factory_folders_to_sys_path
from tests.makers import bert, recipe

MINE = {"task": "custom", "factory": "pkg_of_mine.models:net"}
DATA = {"train": {"format": "custom", "factory": "pkg_of_mine.models:data"}}


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A copy of sys.path for this test, and a current folder without modules."""
    (tmp_path / "here").mkdir()
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    return sys.path


def package(folder: Path, name: str = "pkg_of_mine") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    # The import system caches folder listings, and would miss a package made just now.
    importlib.invalidate_caches()
    return folder / name


def test_the_recipes_folder_comes_last(path: list[str], tmp_path: Path) -> None:
    """A factory's module beside the recipe is found, after everything that is installed."""
    package(tmp_path / "beside")
    before = [*path]
    append_factory_folders_to_sys_path(recipe(model=MINE, data=DATA), tmp_path / "beside")
    assert path == [*before, str(tmp_path / "beside")]


def test_the_current_folder_is_for_a_factory_that_lies_there(
    path: list[str], tmp_path: Path
) -> None:
    """A factory's module in the current folder is found where there is none beside the recipe."""
    package(tmp_path / "here")
    before = [*path]
    append_factory_folders_to_sys_path(recipe(model=MINE, data=DATA), tmp_path / "beside")
    assert path == [*before, str(tmp_path / "here")]


def test_without_a_factory_nothing_is_added(path: list[str], tmp_path: Path) -> None:
    """A recipe with no user module, or with an installed one, adds no folder to sys.path."""
    before = [*path]
    append_factory_folders_to_sys_path(bert(), tmp_path / "beside")
    append_factory_folders_to_sys_path(
        recipe(model={**MINE, "factory": "json:loads"}, data=DATA), tmp_path / "beside"
    )
    assert path == before


def test_a_module_that_is_hidden_is_told(path: list[str], tmp_path: Path) -> None:
    """An installed module of the factory's name wins, and the error names both files."""
    package(tmp_path / "beside", "json")
    with pytest.raises(InputError) as caught:
        append_factory_folders_to_sys_path(
            recipe(model={**MINE, "factory": "json:loads"}, data=DATA), tmp_path / "beside"
        )
    json = importlib.import_module("json").__file__
    assert str(caught.value) == (
        f"model.factory: 'json:loads' is {json}, which is imported before your "
        f"{tmp_path}/beside/json/__init__.py; rename your module"
    )


def test_a_module_that_is_installed_from_here_is_not_hidden(
    path: list[str], tmp_path: Path
) -> None:
    """A folder that is already on sys.path, as after `pip install -e .`, is no error."""
    package(tmp_path / "beside")
    path.append(str(tmp_path / "beside"))
    before = [*path]
    append_factory_folders_to_sys_path(recipe(model=MINE, data=DATA), tmp_path / "beside")
    assert path == before

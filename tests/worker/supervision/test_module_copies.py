"""modules/: the user's own code in the run folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.supervision import module_copies as own
from ortlaunch.worker.supervision.module_copies import (
    copy_user_modules_into_run_folder_and_list_notes,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an imported package and an imported module."""
    folder = tmp_path / "project"
    (folder / "own_package").mkdir(parents=True)
    (folder / "own_package/__init__.py").write_text("from own_package import part\n")
    (folder / "own_package/part.py").write_text("x = 1\n")
    (folder / "own_single.py").write_text("y = 2\n")
    # The tests, and the modules that they import, do not count as the user's.
    monkeypatch.setattr(own, "_INSTALLED", (*own._INSTALLED, "tests", "tools", "benchmarks"))
    monkeypatch.syspath_prepend(str(folder))
    for name in ("own_package", "own_single"):
        importlib.import_module(name)
    yield folder
    # Modules that another test imported stay for the next one.
    for name in ("own_package", "own_package.part", "own_single"):
        del sys.modules[name]


def kept(run: RunDir) -> dict[str, str]:
    """Return the files in modules/ with their text."""
    files = (path for path in run.modules.rglob("*") if path.is_file())
    return {str(path.relative_to(run.modules)): path.read_text() for path in files}


def test_what_was_imported_is_copied(project: Path, tmp_path: Path) -> None:
    """Imported packages and modules of the user's are copied, by their place on Python's path."""
    run = RunDir(tmp_path / "run")
    assert copy_user_modules_into_run_folder_and_list_notes(run) == []
    assert kept(run) == {
        "own_package/__init__.py": "from own_package import part\n", "own_package/part.py": "x = 1\n",
        "own_single.py": "y = 2\n",
    }  # fmt: skip


def test_a_changed_module_is_told_and_one_edited_meanwhile_is_not_taken(
    project: Path, tmp_path: Path
) -> None:
    """A module that changed between starts is reported; an edit during a start is not copied."""
    run = RunDir(tmp_path / "run")
    copy_user_modules_into_run_folder_and_list_notes(run)
    (project / "own_single.py").write_text("y = 3\n")
    assert copy_user_modules_into_run_folder_and_list_notes(run, keeps_existing=True) == []
    assert kept(run)["own_single.py"] == "y = 2\n"
    expected = [
        f"{project}/own_single.py differs from the version that an earlier start of this run "
        "imported"
    ]
    assert copy_user_modules_into_run_folder_and_list_notes(run) == expected
    assert kept(run)["own_single.py"] == "y = 3\n"


def test_what_is_too_large_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is too large is reported, not copied; the total size is limited, too."""
    monkeypatch.setattr(own, "_MAX_FILE_BYTES", 10)
    run = RunDir(tmp_path / "run")
    assert copy_user_modules_into_run_folder_and_list_notes(run) == [
        f"{project}/own_package/__init__.py (29 B) is not copied into {run.modules}: too large"
    ]
    monkeypatch.setattr(own, "_MAX_TOTAL_BYTES", 6)
    assert len(copy_user_modules_into_run_folder_and_list_notes(RunDir(tmp_path / "small"))) == 2

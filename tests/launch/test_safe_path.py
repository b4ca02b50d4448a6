"""Tests that a run executes installed packages, and only named files of the folders around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.tiny import RECIPE, needs_mpi, ortlaunch, write_recipe

# Modules that Python, the command, torchrun or a rank import. The last two are optional packages.
NAMES = (
    "runpy",
    "random",
    "typer",
    "yaml",
    "torch",
    "numpy",
    "sitecustomize",
    "apex",
    "flash_attn",
)
# Leaves a file and ends the process, so that no import of it can go unnoticed.
PLANTED = (
    "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nraise SystemExit(77)\n"
)


@pytest.mark.parametrize(
    "launcher",
    [
        "local",
        pytest.param("torchrun", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_files_around_a_run_are_not_run(launcher: str, tmp_path: Path) -> None:
    """Files named like packages, in the current folder or beside the recipe, are not executed."""
    here = tmp_path / "here"
    beside = tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        for name in NAMES:
            (folder / f"{name}.py").write_text(PLANTED)
    write_recipe(beside)
    ranks = "1" if launcher == "local" else "2"
    words = (
        "train",
        f"../beside/{RECIPE}",
        f"--launcher={launcher}",
        f"--nproc-per-node={ranks}",
        "--run-dir=run",
    )
    result = ortlaunch(here, *words)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ran")) == []
    assert result.returncode == 0, result.stderr

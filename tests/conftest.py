"""Fixtures shared by every folder of tests."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

from ortlaunch import doctor
from ortlaunch.rank import VARIABLES
from tests.makers import OWN_MODULE

pytest_plugins = ["tests.page"]

# Each process of ours that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What launchers, schedulers and shells leave: a test that starts under one of them must not become its rank.
_LEFT_BY_LAUNCHERS = (
    "OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "HYDI_", "MV2_", "PALS_", "SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_",
    "ROLE_", "CUDA_VISIBLE_DEVICES", "ORTLAUNCH_PROGRESS",
)  # fmt: skip

_LONGEST_FIRST = (
    "e2e",
    "launch",
    "worker",
    "ortmodule",
)  # and the others, whose files are short, at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start whole runs first, so that no process of `make test` is left alone with one at the end."""
    folders = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: folders.get(item.path.relative_to(root).parts[0], len(folders)))


@functools.cache
def _leave_out_of_collections(modules: int) -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _libraries_are_no_garbage() -> None:
    """Garbage is not looked for in what was loaded: each of ORT's exports asks for a collection, over all of torch."""
    _leave_out_of_collections(len(sys.modules) // 50)


@pytest.fixture(autouse=True)
def _no_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes launchers' variables, and GPUs but for tests marked gpu, from this process and what it starts."""
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(_LEFT_BY_LAUNCHERS):
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a cache and a shell of the test's own, where any engine may be asked for."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "require", lambda *_: None)  # whatever is installed here

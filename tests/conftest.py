"""Fixtures shared by every folder of tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch import doctor
from ortlaunch.rank import VARIABLES
from ortmodule_tests.session import (
    end_no_slow_test_at_a_warning,
    libraries_are_no_garbage,
    no_gpu,
)
from tests.makers import OWN_MODULE

__all__ = ["libraries_are_no_garbage", "no_gpu"]

pytest_plugins = ["tests.page"]

# Variables that launchers, schedulers and shells set. A test that runs under one of them must not
# act as its rank.
_LEFT_BY_LAUNCHERS = (
    "OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "HYDI_", "MV2_", "PALS_", "SLURM_", "TORCHELASTIC_",
    "MASTER_", "GROUP_", "ROLE_", "ORTLAUNCH_PROGRESS",
)  # fmt: skip

# Files and folders that take long; all others are short and run at the end. The lab's files mostly
# wait, so that two of them and one of e2e begin together.
_LONGEST_FIRST = (
    "cluster/test_runs.py", "cluster/test_requeue.py", "e2e", "cluster/test_ends.py", "launch",
    "worker", "ortmodule",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: those that start complete runs come first.

    Warnings are no errors in tests that `make test` leaves out.
    """
    # Otherwise one process of `make test` would run a long file alone at the end.
    root = Path(__file__).parents[1]

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix().removeprefix("tests/")
        return next(
            (at for at, name in enumerate(_LONGEST_FIRST) if path.startswith(name)),
            len(_LONGEST_FIRST),
        )

    items.sort(key=place)
    end_no_slow_test_at_a_warning(items)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launchers' variables, in this process and its children."""
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(_LEFT_BY_LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own working folder and cache, in which any engine may be requested."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # The plan must not depend on the packages that are installed here.
    monkeypatch.setattr(doctor, "require_packages_and_extensions_installed", lambda *_: None)

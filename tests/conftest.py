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

# Without bytecode files, each process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Threads that wait for others of their process would spin and take the cores from the tests beside
# them: training took up to six times the processor time. libgomp reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Variables that launchers, schedulers and shells set. A test that runs under one of them must not
# act as its rank.
_LEFT_BY_LAUNCHERS = (
    "OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "HYDI_", "MV2_", "PALS_", "SLURM_", "TORCHELASTIC_",
    "MASTER_", "GROUP_", "ROLE_", "CUDA_VISIBLE_DEVICES", "ORTLAUNCH_PROGRESS",
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
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix()
        return next(
            (at for at, name in enumerate(_LONGEST_FIRST) if path.startswith(name)),
            len(_LONGEST_FIRST),
        )

    items.sort(key=place)
    # They run for hours, or with other packages, and must not end at a warning of one of those.
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "nightly", "zoo", "gpu")):
            item.add_marker(pytest.mark.filterwarnings("default"))


@functools.cache
def _leave_out_of_collections(modules: int) -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _libraries_are_no_garbage() -> None:
    """Keep loaded libraries out of garbage collections."""
    # Every export of ONNX Runtime starts a collection, which would visit all objects of torch. The
    # cache repeats the freeze for each 50 newly loaded modules.
    _leave_out_of_collections(len(sys.modules) // 50)


@pytest.fixture(autouse=True)
def _no_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launchers' variables, and hide GPUs except from tests marked gpu.

    This applies to this process and its children.
    """
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(_LEFT_BY_LAUNCHERS):
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own working folder and cache, in which any engine may be requested."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # The plan must not depend on the packages that are installed here.
    monkeypatch.setattr(doctor, "require_packages_and_extensions_installed", lambda *_: None)

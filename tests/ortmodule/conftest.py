"""Fixtures for tests on ONNX Runtime."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ortlaunch.ortmodule.witness import Witness
from tests.ort import build


@pytest.fixture(scope="session")
def built() -> None:
    """The extensions of this stack."""
    build()


@pytest.fixture
def witness(built: None) -> Witness:
    """Counts what ORT runs in this test."""
    witness = Witness()
    witness.install()
    return witness


@pytest.fixture
def seeded() -> None:
    """The same weights in every run."""
    torch.manual_seed(0)


Process = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[str], Process], str], Process]]:
    """`ahead(run, repair)` is `run(repair)`, and begins the runs of the tests that come next: two at a time.

    Such a run spends most of its time on imports, which take one core.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    with ThreadPoolExecutor(max_workers=2) as pool:
        begun = {}

        def asked(run: Callable[[str], Process], repair: str) -> Process:
            mine = [test.callspec.params["repair"] for test in tests
                    if test.module is request.module and "repair" in test.callspec.params]  # fmt: skip
            for name in mine[mine.index(repair) :]:
                if name not in begun:
                    begun[name] = pool.submit(run, name)
            return begun[repair].result()

        yield asked
        pool.shutdown(cancel_futures=True)

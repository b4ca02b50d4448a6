"""Fixtures and hooks of tests/gpu: order of tests, reference losses, a clean end by SIGTERM."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from filelock import FileLock

from tests.e2e import forked
from tests.gpu import cases, smoke
from tests.ort import INSTALLED, build
from tests.page import Results

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the GPU tests out under the default mark expression."""
    return True if "not gpu" in config.option.markexpr else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the GPU cases by part; other tests marked gpu follow part `ort`."""
    parts = [*cases.PARTS]
    order = {part: place for place, part in enumerate(parts)}

    def place(item: pytest.Item) -> float:
        case = item.callspec.params["case"] if HERE in item.path.parents else None  # type: ignore[attr-defined]
        # A half keeps the other tests between part `ort` and the next one.
        return order[case.part] if case else order["ort"] + 0.5

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into the end of the session."""
    # The default handler would kill pytest and leave the processes of the current case running.

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.exit("SIGTERM", returncode=128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results and time limit of this call, also without --page."""
    found: Results | None = pytestconfig.pluginmanager.get_plugin("results of long tests")
    return found or Results(pytestconfig, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config, results: Results) -> str:
    """Return the device of --device; end the session if this machine has none."""
    device: str = pytestconfig.getoption("--device")
    if device == "cuda" and results.machine["memory"] is None:
        pytest.exit(
            "torch sees no CUDA device here; add --device cpu for a rehearsal", returncode=2
        )
    return device


@pytest.fixture(scope="session")
def cold(device: str) -> bool:
    """Preload the shared libraries; return True if forked ranks must load them themselves."""
    return not forked.preload(device)


@pytest.fixture(scope="session")
def extensions(results: Results) -> None:
    """Build ONNX Runtime's torch extensions, which engine ort needs."""
    # Workers of pytest-xdist share the folder: one of them builds, the others wait.
    results.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(results.folder / "references.lock"):
        if INSTALLED:
            build()


@pytest.fixture(scope="session")
def losses_of(
    results: Results, device: str, cold: bool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[float]]:
    """Return a function that gives a reference's losses, computed once for each results folder."""

    @functools.cache
    def losses(name: str) -> list[float]:
        file = results.folder / f"reference-{name.replace('/', '-')}.json"
        results.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(results.folder / "references.lock"):
            if not file.exists():
                file.write_text(json.dumps(computed(name)))
        found: list[float] = json.loads(file.read_text())
        return found

    def computed(name: str) -> list[float]:
        if name == "smoke":
            folder = tmp_path_factory.mktemp("reference") / "case"
            status, _, log = smoke.run(smoke.reference(), folder, 600, cold)
            assert status == 0, log[-3000:]
            return smoke.losses_of(folder / "run")
        done = subprocess.run(
            cases.plain_curve(name, device),
            cwd=cases.ROOT,
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
        )
        return list(json.loads(done.stdout.splitlines()[-1]))

    return losses

"""What tests/gpu shares: its place in a session, references, and an end by SIGTERM that leaves no run behind."""

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
    """The default expression of marks leaves these out."""
    return True if "not gpu" in config.option.markexpr else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other tests marked gpu come after part `ort`."""
    parts = [*cases.PARTS]
    order = {part: place for place, part in enumerate(parts)}

    def place(item: pytest.Item) -> float:
        case = item.callspec.params["case"] if HERE in item.path.parents else None  # type: ignore[attr-defined]
        return order[case.part] if case else order["ort"] + 0.5

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _ended_by_sigterm() -> Iterator[None]:
    """So that a case under way is ended first."""

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.exit("SIGTERM", returncode=128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results and the time of this call; of a call without --page too."""
    found: Results | None = pytestconfig.pluginmanager.get_plugin("results of long tests")
    return found or Results(pytestconfig, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config, results: Results) -> str:
    """The one of --device, which must be here."""
    device: str = pytestconfig.getoption("--device")
    if device == "cuda" and results.machine["memory"] is None:
        pytest.exit(
            "torch sees no CUDA device here; add --device cpu for a rehearsal", returncode=2
        )
    return device


@pytest.fixture(scope="session")
def cold(device: str) -> bool:
    """Load what all copies share; whether they cannot use the GPU, so that each rank loads it itself."""
    return not forked.preload(device)


@pytest.fixture(scope="session")
def extensions(results: Results) -> None:
    """ONNX Runtime's torch extensions, which engine ort needs."""
    results.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(results.folder / "references.lock"):
        if INSTALLED:
            build()


@pytest.fixture(scope="session")
def losses_of(
    results: Results, device: str, cold: bool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[float]]:
    """The losses of a reference, computed once for a folder of results."""

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

"""Real ranks resume: bit for bit in the same world size, on the same curve in any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import torchrun
from tests.worker.checkpoint_ranks import ALONE, SAVED, WAYS

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow


def ranks(count: int, folder: Path) -> Any:
    """Run a world of this size, and return the results of its ranks in order."""
    file = folder / f"found{count}.json"
    torchrun(
        count,
        "-m",
        "tests.worker.checkpoint_ranks",
        str(folder / "checkpoints"),
        str(file),
        timeout=300,
    )
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> Any:
    return ranks(2, folder)


@pytest.mark.ci
@pytest.mark.parametrize("way", [*WAYS, *ALONE, "async"])
def test_the_same_world_goes_on_bit_for_bit(way: str, two: Any) -> None:
    """In the same world, losses, weights and optimizer are those of an uninterrupted run."""
    for found in two:
        assert found[way]["resumed"] == found[way]["straight"]


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_another_world_goes_on(count: int, two: Any, folder: Path) -> None:
    """In another world size, a resumed run follows the uninterrupted curve."""
    # Every ZeRO stage, and none, resumes from every other one.
    straight = two[0]["none"]["straight"][0][SAVED:]
    for name, (losses, _) in ranks(count, folder)[0].items():
        assert losses == pytest.approx(straight, rel=1e-5), name

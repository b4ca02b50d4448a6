"""Unequal numbers of labels: each engine, sharding and micro size equals PyTorch on one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ort import build, needs_ort
from tests.torchrun import torchrun
from tests.worker.unequal_steps import Case, cases, reference

pytest.importorskip("deepspeed")
QUICK = [
    *(
        Case("eager", 2, micro, zero)
        for micro, zero in ((1, "none"), (4, "none"), (2, "0"), (8, "3"))
    ),
    # The loss in chunks.
    *(Case("eager", 2, micro, zero, "8") for micro, zero in ((1, "2"), (4, "none"))),
]
GROUPS = [
    pytest.param(engine, ranks, marks=[pytest.mark.slow, *([needs_ort] if engine == "ort" else [])])
    for engine in ("eager", "inductor", "ort")
    for ranks in (1, 2)
]


def took(chosen: list[Case], file: Path, timeout: float) -> dict[str, Any]:
    """Run cases of one engine and number of ranks in one process group; return their results."""
    engine, ranks, *_ = chosen[0]
    wanted = [f"{case.micro},{case.zero},{case.chunk}" for case in chosen]
    torchrun(ranks, "-m", "tests.worker.unequal_steps", str(file), engine, *wanted, timeout=timeout)
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def compare(chosen: list[Case], folder: Path, timeout: float) -> None:
    """Check loss and gradient norm of two steps in each case."""
    # The second step shows the gradients of the first. `pytest -rP` prints the differences.
    expected = reference()
    found = took(chosen, folder / "found.json", timeout)
    apart = {str(case): largest(found[str(case)], expected) for case in chosen}
    print(*(f"{case}: {difference:.1e}" for case, difference in apart.items()), sep="\n")
    assert {case: difference for case, difference in apart.items() if difference > 1e-6} == {}
    # ORT must have run passes, and torch.compile graphs.
    assert [case for case in apart if not found[case]["ran"]] == []


def largest(found: dict[str, Any], expected: dict[str, list[float]]) -> float:
    """Return the largest relative difference of all values."""
    pairs = [
        (ours, right)
        for name, values in expected.items()
        for ours, right in zip(found[name], values)
    ]
    return max(abs(ours - right) / abs(right) for ours, right in pairs)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(200)
def test_two_ranks_are_one_batch(tmp_path: Path) -> None:
    """Two ranks with DDP and ZeRO 0, 2 and 3 equal one batch within 1e-6."""
    # In some passes a rank has no label that counts.
    compare(QUICK, tmp_path, 180)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("engine", "ranks"), GROUPS)
def test_every_way_is_one_batch(engine: str, ranks: int, tmp_path: Path) -> None:
    """All cases equal one batch within 1e-6."""
    if engine == "ort":
        build()
    compare([case for case in cases((engine,)) if case.ranks == ranks], tmp_path, 1100)

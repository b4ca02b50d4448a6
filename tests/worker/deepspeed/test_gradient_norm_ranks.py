"""Two real ranks under DeepSpeed ZeRO 1 and 2: our overflow check and gradient norm change no step of a training."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.torchrun import torchrun
from tests.worker.zero_steps import BAD_STEP, CASES

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.ci]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both ways of every case did, seen by rank 0."""
    file = tmp_path_factory.mktemp("zero") / "found.json"
    torchrun(2, "-m", "tests.worker.zero_steps", str(file), timeout=240)
    read: dict[str, Any] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_the_same(case: str, found: dict[str, Any]) -> None:
    """Losses, skipped steps and weights are stock's; norms are stock's and float64's within 1e-6."""
    stock = found[case]["stock"]
    ours = found[case]["ours"]
    assert ours["applied"] == {"applied": True, "by": "ortlaunch", "why": ""}
    assert ours["skipped"] == stock["skipped"]
    for name in ("losses", "weights", "norms"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-6, nan_ok=True), name
    for norm, exact in zip(ours["norms"], ours["exact"]):
        if math.isfinite(exact) and exact < 1e19:  # DeepSpeed sums squares over ranks in float32
            assert norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_measured_once_a_step(case: str, found: dict[str, Any]) -> None:
    """Check and norm share one pass over each parameter group's gradients, and DeepSpeed's own way has none of it."""
    assert found[case]["stock"]["calls"] == 0
    # Rank 0: two groups, and in the checked precisions the padding of a group where it has one.
    steps = len(found[case]["ours"]["norms"])
    assert 2 * steps - 1 <= found[case]["ours"]["calls"] <= 3 * steps


@pytest.mark.parametrize(("case", "skips"), [
    ("nan on rank 1, fp32", True), ("nan on rank 1, bf16", True), ("inf on rank 1, bf16", True),
    ("huge on rank 1, fp32", True), ("zero gradients", False),
])  # fmt: skip
def test_bad_gradients_are_bad(case: str, skips: bool, found: dict[str, Any]) -> None:
    """The cases with planted gradients do what they are there for: a step is skipped, or its norm is 0."""
    ours = found[case]["ours"]
    assert ours["skipped"][BAD_STEP] - ours["skipped"][BAD_STEP - 1] == int(skips)
    if not skips:
        assert ours["norms"][BAD_STEP] == 0

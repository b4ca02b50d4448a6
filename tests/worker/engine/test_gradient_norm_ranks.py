"""On two ranks with ZeRO 1 and 2, the fused check and norm give the same training as DeepSpeed."""

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
    """Return rank 0's results of every case, with DeepSpeed's functions and with the fused pass."""
    file = tmp_path_factory.mktemp("zero") / "found.json"
    # One launch of the ranks for all cases.
    torchrun(2, "-m", "tests.worker.zero_steps", str(file), timeout=240)
    read: dict[str, Any] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_the_same(case: str, found: dict[str, Any]) -> None:
    """Losses, skipped steps, weights and norms equal DeepSpeed's; norms also equal float64's."""
    stock = found[case]["stock"]
    ours = found[case]["ours"]
    assert ours["refusal_reason"] == ""
    assert ours["skipped"] == stock["skipped"]
    for name in ("losses", "weights", "norms"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-6, nan_ok=True), name
    for norm, exact in zip(ours["norms"], ours["exact"]):
        # DeepSpeed sums squares over ranks in float32, whose range ends at a norm of about 1e19.
        if math.isfinite(exact) and exact < 1e19:
            assert norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_measured_once_a_step(case: str, found: dict[str, Any]) -> None:
    """Check and norm share one pass over the gradients of each parameter group."""
    assert found[case]["stock"]["calls"] == 0
    # Rank 0: two groups, and in the checked precisions the padding of a group where it has one.
    steps = len(found[case]["ours"]["norms"])
    assert 2 * steps - 1 <= found[case]["ours"]["calls"] <= 3 * steps


@pytest.mark.parametrize(("case", "skips"), [
    ("nan on rank 1, fp32", True), ("nan on rank 1, bf16", True), ("inf on rank 1, bf16", True),
    ("huge on rank 1, fp32", True), ("zero gradients", False),
])  # fmt: skip
def test_bad_gradients_are_bad(case: str, skips: bool, found: dict[str, Any]) -> None:
    """A step with planted bad gradients is skipped; with zero gradients its norm is 0."""
    ours = found[case]["ours"]
    assert ours["skipped"][BAD_STEP] - ours["skipped"][BAD_STEP - 1] == int(skips)
    if not skips:
        assert ours["norms"][BAD_STEP] == 0

"""Every engine, launch and sharding gives the loss curve of plain PyTorch.

The whole table is benchmarks/parity.py.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.parity import STEPS, Case, cases, largest_difference, reference, train

IN_CI = {
    Case("llama2-7b/tiny", "ort", "mpirun", 2),
    Case("bert-large/tiny", "ort", "one process", None),
}
CASES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.ci] if case in IN_CI else [])
    for case in cases()
]
# A reference takes as long as a run, and serves all cases of its recipe.
_references: dict[str, list[float]] = {}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_plain_pytorchs(case: Case, tmp_path):
    """Twenty steps are within 1e-3 of the reference, and engine ort runs every pass itself."""
    if case.recipe not in _references:
        _references[case.recipe] = reference(case.recipe)
    losses = train(case, tmp_path / "run")
    assert largest_difference(losses, _references[case.recipe]) < 1e-3
    if case.engine == "ort":
        _ran_on_onnx_runtime(case, json.loads((tmp_path / "run" / "engine.json").read_text()))


def _ran_on_onnx_runtime(case: Case, truth: dict) -> None:
    ranks = 1 if case.launch == "one process" else 2
    passes = STEPS * 4 // ranks  # 16 samples in micro batches of 4
    ort = truth["onnxruntime"]
    assert truth["engine"]["used"] == "ort"
    assert (ort["forward_passes"], ort["backward_passes"], ort["fallbacks"]) == (passes, passes, 0)

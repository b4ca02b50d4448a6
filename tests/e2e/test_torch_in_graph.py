"""Whole runs with torch operators and layers inside ONNX Runtime's graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import TOY, TWO_RANKS, Train, ended_well, merged
from tests.ort import needs_ort

pytestmark = needs_ort

# A layer whose branch depends on the data cannot be exported.
LAYERS = """
import torch
from torch import nn


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x).tanh() + self.down(x) if x.mean().item() > 0 else self.down(x) * self.up(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.norm, self.last = nn.Linear(8, 8), Decides(), nn.RMSNorm(8), nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.last(self.norm(self.inner(nn.functional.mish(self.first(x))))) - y).square().mean()


def net():
    return Net()


def wrong_in_graphs():
    from ortmodule._internal.base import torch_calls

    plain = torch_calls._make_gradient_or_zeros_and_add_its_address
    torch_calls._make_gradient_or_zeros_and_add_its_address = (
    lambda found, leaf, taken: plain(found, leaf, taken) * 1.01
)
    return Net()
"""
RECIPE = merged(
    TOY,
    {
        "model": {"factory": "layers:net"},
        "engine": {"name": "ort", "torch_modules": ["inner"]},
        "train": {"max_steps": 6},
    },
)


@pytest.fixture(scope="module", autouse=True)
def layers(home: Path) -> None:
    (home / "layers.py").write_text(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, {"stage": 1}, {"stage": 2}], ids=["ddp", "zero1", "zero2"])
def test_two_ranks_with_a_layer_in_torch(train: Train, zero: Any) -> None:
    """Losses equal eager's under DistributedDataParallel, and torch's parts are reported."""
    # Not compared with eager ZeRO 2: its ranks take different branches of the layer, and reduce
    # gradients in another order.
    sharded = {"zero": zero} if zero else {}
    name = f"zero{zero['stage']}" if zero else "ddp"
    ours = ended_well(train(f"torch-{name}", merged(RECIPE, sharded), *TWO_RANKS, timeout=300))
    plain = {"engine": {"name": "eager", "torch_modules": []}}
    eager = ended_well(train(f"eager-{name}", merged(RECIPE, plain), *TWO_RANKS, timeout=300))
    assert ours.losses() == pytest.approx(eager.losses(), rel=1e-5)
    calls = ours.truth()["onnxruntime"]["torch_calls"]
    steps = 6 * 2  # micro batches of a rank
    assert {key: value["forward"] for key, value in calls.items()} == dict.fromkeys(
        ("aten.mish", "aten.rms_norm", "module.model.inner"), steps
    )
    assert "torch inside the graph: " in ours.out


@pytest.mark.slow
@pytest.mark.ci
def test_a_wrong_derivative_is_found_by_the_parity_step(train: Train) -> None:
    """A parity step detects gradients of torch's operators that are 1 % too large."""
    planted = {
        "model": {"factory": "layers:wrong_in_graphs"},
        "engine": {"parity_steps": 1, "parity_tolerance": 1e-3},
    }
    run = train("planted", merged(RECIPE, planted))
    assert run.status != 0
    assert "differ" in run.err
    right = ended_well(train("right", merged(RECIPE, {"engine": {"parity_steps": 2}})))
    assert right.truth()["parity"]["verdict"] == "passed"

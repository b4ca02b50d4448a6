"""Settings that crash in ORTModule 1.19.2: each repair is necessary and sufficient."""

from __future__ import annotations

import json

import pytest

from ortmodule._internal.native import extensions
from ortmodule_tests.forks import Run
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort
# Arguments: the name of the repair to leave out, and a JSON list of settings.
WITHOUT_REPAIR = """
import json, sys
from ortmodule._internal.base import repair_registry
from ortmodule import ORTModule, Settings
repair_registry.record_unapplied_repair(sys.argv[1], "left out")
import torch
model = torch.nn.Linear(4, 1)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x).sum()
for settings in json.loads(sys.argv[2]):
    model = Loss()
    ORTModule(model, Settings(threads=1, **settings))(torch.ones(2, 4)).backward()
    assert model.linear.weight.grad.tolist() == [[2.0] * 4]
"""


@pytest.mark.parametrize("skipped", ["nothing", "skip_ignored_labels"])
def test_switching_sparsity_off_needs_its_repair(skipped: str, built: None, fresh_ort: Run) -> None:
    """Without its repair ORTModule iterates over None if one of the two optimizers is off."""
    done = fresh_ort(
        WITHOUT_REPAIR,
        skipped,
        json.dumps([{"compute_optimizer": False}, {"sparsity_optimizer": False}]),
    )
    if skipped == "nothing":
        assert done.returncode == 0, done.stderr
    else:
        assert "'NoneType' object is not iterable" in done.stderr


@pytest.mark.parametrize("skipped", ["nothing", "pass_device_to_ort_grad_management"])
def test_gradient_management_needs_its_repair(skipped: str, built: None, fresh_ort: Run) -> None:
    """Without its repair ORTModule passes parameters to torch.zeros as a device."""
    # The setting needs this extension.
    if extensions.reason_interop_is_unbuildable_or_empty():
        pytest.skip("needs ORT's extension torch_interop_utils")
    done = fresh_ort(
        WITHOUT_REPAIR, skipped, json.dumps([{"memory_efficient_grad_management": True}])
    )
    if skipped == "nothing":
        assert done.returncode == 0, done.stderr
    else:
        assert "zeros()" in done.stderr

"""ORTModule.report(): the counts of passes and exports, the provider and the settings."""

from __future__ import annotations

import json

import torch

from ortmodule import ORTModule, Settings
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort


def test_report(witness: PassAndGraphCounters) -> None:
    """It has what ran, as JSON: nothing before the first pass, then graph, passes and provider."""
    net = ORTModule(torch.nn.Linear(4, 2), Settings(opset=16))
    before = net.report()
    assert (before["provider"], before["graphs_built"]) == ("", 0)
    for _ in range(2):
        net(torch.ones(3, 4)).sum().backward()
    after = net.report()
    assert after["provider"] == "CPUExecutionProvider"
    assert after["settings"] == {"opset": 16}
    assert (after["forward_passes"], after["backward_passes"], after["graphs_built"]) == (2, 2, 1)
    assert after["exports"] == before["exports"] + 1
    assert (after["fallbacks"], after["fallback_reasons"]) == (0, [])
    assert {"choose_graph_per_pass", "skip_frozen_gradients"} <= set(after["repairs"])
    assert after["training_graph"]["nodes_by_provider"] == {
        "CPUExecutionProvider": after["nodes_run"] // 2
    }
    assert json.loads(json.dumps(after)) == after

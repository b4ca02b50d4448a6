"""FusedAdam and FP16_Optimizer in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ortmodule import FP16_Optimizer, FusedAdam
from ortmodule._internal import fused_adam
from ortmodule._internal.base.counters import tally


@pytest.mark.parametrize("grouped", [False, True])
def test_fused_adam_is_torchs_on_a_cpu(grouped: bool) -> None:
    """The replacement has the settings and steps of torch's AdamW; it is a warning and a note."""
    torch.manual_seed(0)
    nets = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    nets[1].load_state_dict(nets[0].state_dict())
    groups = [
        [{"params": net.parameters(), "weight_decay": 0.1}] if grouped else net.parameters()
        for net in nets
    ]
    with pytest.warns(UserWarning, match="runs instead: ONNX Runtime's is for CUDA only"):
        ours = FusedAdam(groups[0], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
    theirs = torch.optim.AdamW(groups[1], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for optimizer, net in zip((ours, theirs), nets):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)
    assert any("FusedAdam" in note for note in tally.notes)


def test_too_large_a_tensor_is_a_reason() -> None:
    """FusedAdam's kernel counts in int32: torch's replaces it beyond that."""
    weight: Any = type("Large", (), {"device": torch.device("cuda"), "numel": lambda _: 2**31})()
    assert "2,147,483,648 elements" in fused_adam.reason_ort_adam_is_unsupported_or_empty(
        [{"params": [weight]}]
    )


def test_an_unsupported_optimizer_stays_and_is_reported() -> None:
    """FP16_Optimizer returns the optimizer itself, with a warning that has the reason."""
    pytest.importorskip("deepspeed")
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="changed nothing: .*ZeRO 1 and 2 are supported, not SGD"):
        assert FP16_Optimizer(optimizer) is optimizer

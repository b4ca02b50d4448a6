"""The pass of a whole model on rank 0, before the model is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ortlaunch.worker.engine.differences import PassResult
from ortlaunch.worker.engine.divided_comparison import (
    ReferencePass,
    compare_pass_of_divided_model_on_rank_0,
    run_reference_pass_on_rank_0,
)

BATCH = {"x": torch.ones(4, 2)}
LONE_RANK: Any = SimpleNamespace(
    rank=0, device=torch.device("cpu"), gather=lambda own_value: [own_value]
)


class Net(nn.Module):
    """A layer with statistics, which a pass changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.kind == "draws":
            x = nn.functional.dropout(x, 0.5)
        if self.kind == "fails":
            raise ImportError("no such kernel")
        return x.square().mean()


@pytest.mark.parametrize(
    ("kind", "error"), [("runs", ""), ("fails", "no such kernel"), ("draws", "random numbers")]
)
def test_a_pass_that_cannot_be_compared_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: str
) -> None:
    """All ranks get the reason, and the pass leaves statistics as they were."""
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: None)
    net = Net(kind)
    reference = run_reference_pass_on_rank_0(net, BATCH, "fp32", LONE_RANK)
    assert error in reference.error
    assert (reference.result is None) == bool(error)
    assert torch.equal(net.norm.running_var, torch.ones(2))


def test_compared_gradients_are_freed() -> None:
    """Else rank 0 would hold those of the whole model for the whole run."""
    net = Net("runs")
    none_by_name = {name: None for name, _ in net.named_parameters()}
    reference = ReferencePass(BATCH, PassResult(2.0, none_by_name, {}))
    stepper: Any = SimpleNamespace(
        model=net,
        gradient_factor=1.0,
        whole_gradients=lambda: iter(none_by_name.items()),
        run_micro_batch=lambda batch, is_last_of_step: torch.tensor(2.0),
        drop_gradients=lambda: None,
        returned_values=SimpleNamespace(begin_step=lambda: None),
    )
    compared = compare_pass_of_divided_model_on_rank_0(stepper, reference, BATCH, "fp32")
    assert compared is not None
    assert (reference.result, reference.is_compared) == (None, True)

"""Which graph a pass runs in, by grad mode and by the original module's flags; programs of other loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ort import needs_ort
from tests.ortmodule.programs import Program, compare

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def trained(w: Any, m: nn.Module) -> dict[str, Any]:
    """Three plain steps."""
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    losses = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = w(X).square().mean()
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss
    return losses


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


PROGRAMS: dict[str, Program] = {"plain steps": trained}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_in_eager(name: str) -> None:
    """Its losses, gradients, weights and buffers are eager PyTorch's."""
    compare(PROGRAMS[name], small())

"""Random numbers of a forward pass are eager's: from torch's generator, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.programs import compare

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
Draw = Callable[[torch.Tensor], torch.Tensor]


def all_shapes(x: torch.Tensor) -> torch.Tensor:
    """Draw with the shapes of tensors, of sizes of a batch, and of fixed sizes."""
    # Several draws in a line: their order must be that of torch.
    x = x * torch.randn_like(x) + torch.rand_like(x).lerp(x, 0.5)
    x = x * torch.rand(x.shape[0], 8) + torch.randn(8) * torch.randn(x.shape)
    x = x * torch.empty_like(x).normal_() + nn.init.normal_(torch.empty(8), 1.0, 2.0)
    return x * torch.randint(0, 9, (8,)) + x.tanh() * torch.randint_like(x, 9)


def distributions(x: torch.Tensor) -> torch.Tensor:
    """Draw from distributions with trained parameters."""
    x = torch.distributions.Normal(x, x.exp()).rsample() * torch.bernoulli(x.sigmoid())
    return x * torch.normal(x, 1.0) + nn.functional.gumbel_softmax(x[:, torch.randperm(8)])


class Drawing(nn.Module):
    """A layer, and a function of the test that draws numbers."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.first(x)).sum()


@pytest.mark.parametrize("draw", [all_shapes, distributions])
def test_numbers_are_eagers(draw: Draw) -> None:
    """Losses and gradients of three steps are eager's, one step with another batch size."""

    def trained(module: Any, model: nn.Module) -> dict[str, Any]:
        losses = {}
        # Numbers drawn while a graph is exported must not advance the generator.
        for step, rows in enumerate((6, 6, 4)):
            losses[f"loss {step}"] = loss = module(X[:rows])
            loss.backward()
        return losses

    compare(trained, Drawing(draw))


def test_a_seed_repeats_dropout_and_draws() -> None:
    """A pass after the same `torch.manual_seed` has the same numbers, and another seed has others."""
    module = wrapped(Drawing(lambda x: nn.functional.dropout(x) * torch.randn_like(x)))
    values = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        values.append(module(X).item())
    assert values[0] == values[1] != values[2]

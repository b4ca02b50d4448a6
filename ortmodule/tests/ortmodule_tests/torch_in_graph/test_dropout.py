"""Dropout in a CPU graph: torch's generator, the right probability, one mask in both passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule._internal.torch_in_graph import dropout
from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort


class Dropping(nn.Module):
    """A model whose weight's gradient is its output divided by its weight.

    Both have the same elements dropped and the others scaled equally.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        # Not zero, so that an output of zero is a dropped element.
        self.weight = nn.Parameter(torch.rand(1000, 63) + 1)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dropped = self.drop(x * self.weight)
        return dropped.sum(), dropped


@pytest.mark.parametrize("settings", [{}, {"memory_optimization": 1}])
def test_both_passes_drop_the_same(witness: PassAndGraphCounters, settings: dict[str, int]) -> None:
    """The gradient has the output's mask and scale; with recomputation the operator is ORT's."""
    model = Dropping(0.25)
    total, dropped = wrapped(model, **settings)(torch.ones(1000, 63))
    total.backward()
    assert model.weight.grad is not None
    # The gradient has the forward pass's mask and scale.
    torch.testing.assert_close(model.weight.grad * model.weight, dropped)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.006)
    (graph,) = witness.graphs
    assert (graph.aten[dropout.FORWARD], graph.aten[dropout.BACKWARD]) == (
        (0, 0) if settings else (1, 1)
    )


def test_torchs_seed_decides(built: None) -> None:
    """The same seed drops the same elements, another seed others."""
    module = wrapped(Dropping(0.5))

    def mask(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return module(torch.ones(1000, 63))[1] == 0

    first = mask(1)
    assert torch.equal(first, mask(1))
    # Two independent masks at 0.5 differ in half of their elements.
    assert float((first != mask(2)).float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.999, 1.0])
def test_the_share_that_is_dropped_is_right_and_the_mean_stays(p: float) -> None:
    """The dropped share is p and the mean is unchanged, within four standard deviations.

    The number of elements, about four million, is no multiple of four.
    """
    torch.manual_seed(3)
    size = 4_000_001
    dropped, kept = dropout.apply_dropout_and_get_kept_mask(torch.ones(size), p, train=True)
    # 2**-17 is the rounding of p to a multiple of 2**-16.
    assert float((dropped == 0).double().mean()) == pytest.approx(
        p, abs=4 * (p * (1 - p) / size) ** 0.5 + 2**-17
    )
    # The standard deviation of the mean; at p = 1 everything is zero.
    spread = (p / (1 - p) / size) ** 0.5 if p < 1 else 0.0
    assert float(dropped.double().mean()) == pytest.approx(1.0 if p < 1 else 0.0, abs=4 * spread)
    assert torch.equal(
        dropout.dropout_input_gradient(torch.ones(size), kept, p, train=True), dropped
    )


def test_each_element_is_dropped_by_itself() -> None:
    """The four elements that share one random number are uncorrelated."""
    torch.manual_seed(4)
    _, kept = dropout.apply_dropout_and_get_kept_mask(torch.ones(1_000_000), 0.5, train=True)
    # Rows of four elements come from one number; above the diagonal are the pairs' correlations.
    assert torch.corrcoef(kept.view(-1, 4).T.double()).triu(1).abs().max() < 0.01


def test_nothing_is_dropped_outside_training() -> None:
    """In evaluation both passes return their input."""
    x = torch.rand(7)
    same, kept = dropout.apply_dropout_and_get_kept_mask(x, 0.5, train=False)
    assert torch.equal(same, x)
    assert torch.equal(dropout.dropout_input_gradient(x, kept, 0.5, train=False), x)

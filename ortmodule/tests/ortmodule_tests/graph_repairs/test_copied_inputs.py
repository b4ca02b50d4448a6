"""Weights that one operator uses more than once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]


class Twice(nn.Module):
    """A function of two weights, each of which it uses as both arguments."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.row = nn.Parameter(torch.randn(4))
        self.number = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (x + self.function(self.row, self.row).sum(0))
            * self.function(self.number, self.number).sum()
        ).sum()


@pytest.mark.parametrize(
    # stack uses its argument three times.
    "function",
    [torch.mul, torch.add, lambda x, y: torch.stack([x, y, x]).exp()],
)
def test_an_operator_takes_a_weight_twice(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The gradient of a weight that one operator uses twice is the sum of both."""
    model = Twice(function)
    x = torch.randn(3, 4)
    eager = copy.deepcopy(model)
    wrapped(model)(x).backward()
    eager(x).backward()
    same(model, eager)

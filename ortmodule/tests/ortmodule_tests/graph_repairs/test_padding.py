"""Padding by negative amounts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]


class Padded(nn.Module):
    """A model that pads the first dimension of a layer's output, whose size is the batch's."""

    def __init__(self, amounts: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.amounts = amounts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(self.layer(x), (0, 1, *self.amounts), value=2.0).exp().sum()


@pytest.mark.parametrize("amounts", [(-1, 2), (1, -1), (-1, 0)])
def test_negative_padding_crops(amounts: tuple[int, ...]) -> None:
    """Negative padding crops, also all of a dimension."""
    # ORT's Pad reads outside of the tensor here: -0.93 instead of 0.
    model = Padded(amounts)
    eager = copy.deepcopy(model)
    graph = wrapped(model)
    # A batch of one row would leave nothing where more is cropped than added.
    for size in (2, 1, 3) if amounts[0] + amounts[1] >= 0 else (2, 3):
        x = torch.randn(size, 4)
        torch.testing.assert_close(graph(x), eager(x))
        graph(x).backward()
        eager(x).backward()
        same(model, eager)

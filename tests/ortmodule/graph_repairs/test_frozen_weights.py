"""Gradients through layers whose weights are frozen, all or some."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.ort import needs_ort
from tests.ortmodule.modules import same, wrapped

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4, 2),
    "GRU": lambda: nn.GRU(4, 4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
}


class Twice(nn.Module):
    """A layer that is used twice, between trained layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            found = self.layer(h)
            h = found[0] if isinstance(found, tuple) else found
        return h.sin().sum()


def check(layer: nn.Module, frozen: str, *sizes: int) -> None:
    """Compare a step with eager's, with the parameters frozen whose name contains `frozen`."""
    model = Twice(layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    eager = copy.deepcopy(model)
    x = torch.randn(*sizes)
    loss, expected = wrapped(model)(x), eager(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    same(model, eager)


@pytest.mark.parametrize("frozen", ["layer", "layer.weight", "layer.bias", "first"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_gradient_passes_a_frozen_layer(name: str, frozen: str) -> None:
    """The gradient of the layer before, and those of the weights that are not frozen, are eager's."""
    check(LAYERS[name](), frozen, *((5, 4) if name == "GroupNorm" else (3, 2, 4)))


@pytest.mark.parametrize("frozen", ["layer", "layer.weight", "layer.bias"])
def test_a_frozen_layer_norm_is_used_twice(frozen: str) -> None:
    """The weights of a normalization that layers share have one gradient each, or none."""
    check(nn.LayerNorm(4), frozen, 5, 4)

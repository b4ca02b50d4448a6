"""Tensors without a gradient that are concatenated more than once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Part = Callable[["Joining", torch.Tensor], torch.Tensor]
# Tensors without a gradient, by origin.
PARTS: dict[str, Part] = {
    "zeros of the batch's size": lambda model, x: x.new_zeros(x.shape[0], 2),
    "nothing, as Inkling 2 begins": lambda model, x: x.new_zeros(x.shape[0], 0),
    "a constant": lambda model, x: torch.ones(3, 2),
    "a buffer": lambda model, x: model.get_buffer("buffer"),
    "an input's slice": lambda model, x: x[:, :2],
    "truths": lambda model, x: (x[:, :2] > 0).float(),
    "a detached one": lambda model, x: model.first(x).detach()[:, :2],
}


class Joining(nn.Module):
    """A model that concatenates a part twice, before and after its last layer."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.first = nn.Linear(4, 4)
        self.last = nn.LazyLinear(3)
        self.register_buffer("buffer", torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.part(self, x)
        joined = torch.cat([part, self.first(x), part], 1)
        return torch.cat([self.last(joined), part], 1).square().mean()


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_without_a_gradient_joins_several_times(name: str) -> None:
    """A part without a gradient may be concatenated several times."""
    # Without the repair the build fails, because two gradients have one name.
    model = Joining(PARTS[name])
    batches = [torch.randn(3, 4), torch.randn(3, 4) - 1]
    # Sets the size of the lazy layer.
    model(batches[0])
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for x in batches:
        model.zero_grad()
        eager.zero_grad()
        loss = module(x)
        expected = eager(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        same(model, eager)


class Standardizing(nn.Module):
    """Two weights that are normalized to mean 0 and standard deviation 1, as in BiT."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ functional.batch_norm(weight[None], None, None, training=True)[0]
        return x.square().mean()


def test_two_normalizations_without_weights() -> None:
    """Two normalizations without weights have eager's gradients."""
    # Scale and bias of both are equal constants, which ORT merges.
    model = Standardizing()
    x = torch.randn(3, 6)
    eager = copy.deepcopy(model)
    wrapped(model)(x).backward()
    eager(x).backward()
    same(model, eager)

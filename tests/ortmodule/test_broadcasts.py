"""Gradients of what is broadcast, where a graph does not say that a size is 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ort import needs_ort
from tests.ortmodule.modules import IDS, language_model, same, training_graph, wrapped

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Images = Callable[[torch.Tensor], torch.Tensor]


class Excitation(nn.Module):
    """A convolution whose channels are weighed by what follows of their means, as in RegNet."""

    def __init__(self, pool: Images) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (hidden * torch.sigmoid(self.second(self.pool(hidden)))).square().mean()


class Meeting(nn.Module):
    """Two inputs that may be of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.second(y) + self.second(y)).square().sum()


def as_eager(model: nn.Module, *batches: Any) -> Any:
    """Gradients of each batch in ORT's graph are eager's."""
    eager, module = copy.deepcopy(model), wrapped(model)
    for batch in batches:
        model.zero_grad()
        eager.zero_grad()
        eager(*batch).backward()
        module(*batch).backward()
        same(model, eager)
    return module


POOLS: dict[str, Images] = {
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: functional.avg_pool2d(x, 6),
    "maximum": lambda x: functional.max_pool2d(x, 6),
    "torch's": lambda x: functional.mish(x[:, :, :1, :1]),
}


@pytest.mark.parametrize("kind", list(POOLS))
def test_channels_are_weighed(kind: str) -> None:
    """As in RegNet, whose gradient was 120 times too large, or nan."""
    x = torch.randn(2, 3, 6, 6)
    as_eager(Excitation(POOLS[kind]), (x,), (x,))


def test_inputs_of_one_row() -> None:
    """Meet inputs of more, in the first batch or in a later one."""
    one, more, other = torch.randn(1, 3), torch.randn(4, 3), torch.randn(4, 3)
    as_eager(Meeting(), (more, one), (more, other), (one, more))
    as_eager(Meeting(), (more, other), (more[:2], other[:2]), (more, one), (one, more), (one, one), (more, other))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_equal_sizes_are_left_as_they_are(family: str) -> None:
    """A language model's graph asks for no sizes in its gradients."""
    module = wrapped(language_model(family, "sdpa"))
    module(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).backward()
    assert not [name for node in training_graph(module).node for name in node.input if "_ortlaunch_1" in name]

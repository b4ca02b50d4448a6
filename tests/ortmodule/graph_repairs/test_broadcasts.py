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

    def __init__(self, pool: Images, whole: bool = True) -> None:
        super().__init__()
        self.whole = whole
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 1)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        weights = torch.sigmoid(self.second(self.pool(hidden)))
        return (hidden * weights if self.whole else weights).square().mean()


class Meeting(nn.Module):
    """Two inputs that may be of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.second(y) + self.second(y)).square().sum()


def as_eager(model: nn.Module, *batches: Any) -> Any:
    """Gradients of each batch in ORT's graph are eager's."""
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for batch in batches:
        model.zero_grad()
        eager.zero_grad()
        eager(*batch).backward()
        module(*batch).backward()
        same(model, eager)
    return module


class Chosen(nn.Module):
    """Channels or what stands for them: sizes of a pool, of a weight with a row for each channel, and of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 1)
        self.rows = nn.Parameter(torch.randn(8, 1, 1))
        self.number = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        pooled = self.second(functional.adaptive_avg_pool2d(hidden, 1))
        chosen = torch.where(hidden > 0, hidden, pooled) + torch.where(
            hidden > 0.1, self.rows, hidden
        )
        chosen = torch.where(pooled > 0, self.number, self.rows) + torch.where(
            x[:, :1] > 0, pooled, chosen
        )
        return (chosen + pooled.expand(-1, -1, *x.shape[2:])).square().mean()


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


def test_what_is_chosen() -> None:
    """Gradients of what torch.where broadcasts: ORT gave them the size of the result."""
    x = torch.randn(2, 3, 6, 6)
    as_eager(Chosen(), (x,), (torch.randn(3, 3, 4, 4),))


FORMULAS: dict[str, Images] = {
    "half the picture": lambda x: functional.interpolate(
        x, (x.shape[2] // 2, x.shape[3] // 2), mode="bicubic"
    ),
    "a part of it": lambda x: x[:, :, : torch.div(x.shape[2] - 6, 4, rounding_mode="trunc")],
    "no limit": lambda x: functional.softplus(x).clamp(0.0, float("inf")),
}


@pytest.mark.parametrize("of", list(FORMULAS))
def test_sizes_are_formulas(of: str) -> None:
    """Of the input's sizes, and constants are infinite: ORT's inference of shapes ended there."""
    as_eager(
        Excitation(FORMULAS[of], whole=False),
        (torch.randn(2, 3, 12, 12),),
        (torch.randn(2, 3, 16, 16),),
    )


def test_inputs_of_one_row() -> None:
    """Meet inputs of more, in the first batch or in a later one."""
    one = torch.randn(1, 3)
    more = torch.randn(4, 3)
    other = torch.randn(4, 3)
    as_eager(Meeting(), (more, one), (more, other), (one, more))
    as_eager(
        Meeting(),
        (more, other),
        (more[:2], other[:2]),
        (more, one),
        (one, more),
        (one, one),
        (more, other),
    )


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_equal_sizes_are_left_as_they_are(family: str) -> None:
    """A language model's graph asks for no sizes in its gradients."""
    module = wrapped(language_model(family, "sdpa"))
    module(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).backward()
    assert not [
        name
        for node in training_graph(module).node
        for name in node.input
        if "_ortlaunch_1" in name
    ]

"""Gradients of broadcast tensors, where a graph does not contain the size 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule_tests.modules import IDS, language_model, same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Images = Callable[[torch.Tensor], torch.Tensor]


class Excitation(nn.Module):
    """A convolution whose channels are weighted by a function of their means, as in RegNet."""

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
    """Two inputs whose sizes may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.second(y) + self.second(y)).square().sum()


def as_eager(model: nn.Module, *batches: Any) -> Any:
    """Check that the gradients of each batch in ORT's graph are eager's, and return the ORTModule."""
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
    """Choices by torch.where between tensors of different sizes.

    These are channels, a pool's output, a weight with a row for each channel, and a scalar.
    """

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
    # Mish is an operator that torch computes inside the graph.
    "torch's": lambda x: functional.mish(x[:, :, :1, :1]),
}


@pytest.mark.parametrize("kind", list(POOLS))
def test_channels_are_weighed(kind: str) -> None:
    """Gradients of weighted channels are eager's; in RegNet they were 120 times too large, or nan."""
    x = torch.randn(2, 3, 6, 6)
    as_eager(Excitation(POOLS[kind]), (x,), (x,))


def test_what_is_chosen() -> None:
    """Gradients of tensors that torch.where broadcasts are eager's."""
    x = torch.randn(2, 3, 6, 6)
    # Without the repair these gradients have the size of the result.
    as_eager(Chosen(), (x,), (torch.randn(3, 3, 4, 4),))


FORMULAS: dict[str, Images] = {
    "half the picture": lambda x: functional.interpolate(
        x, (x.shape[2] // 2, x.shape[3] // 2), mode="bicubic"
    ),
    "a part of it": lambda x: x[:, :, : torch.div(x.shape[2] - 6, 4, rounding_mode="trunc")],
    # An infinite constant.
    "no limit": lambda x: functional.softplus(x).clamp(0.0, float("inf")),
}


@pytest.mark.parametrize("of", list(FORMULAS))
def test_sizes_are_formulas(of: str) -> None:
    """Sizes computed from the input's, and infinite constants, pass ORT's shape inference."""
    as_eager(
        Excitation(FORMULAS[of], whole=False),
        (torch.randn(2, 3, 12, 12),),
        # Sizes other than those of the export.
        (torch.randn(2, 3, 16, 16),),
    )


def test_inputs_of_one_row() -> None:
    """An input of one row may meet an input of more, in the first batch or in a later one."""
    one = torch.randn(1, 3)
    more = torch.randn(4, 3)
    other = torch.randn(4, 3)
    # The export sees unequal sizes here, and equal ones below.
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


class Column(nn.Module):
    """An input of one column that meets tensors whose sizes are numbers in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.3))
        self.row = nn.Parameter(torch.linspace(0.1, 1.0, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        column = x * self.number
        joined = torch.cat([column, column * self.row], 1)
        return joined.square().sum() + (column[:1] - (self.row * y).topk(2)[0]).square().sum()


def test_a_column_meets_a_fixed_size() -> None:
    """The gradient of a column is summed up, whether it is the first factor or the second."""
    # Without the repair it is wrong: ORT computes the shape of six numbers in advance, so that
    # hiding that shape hides nothing.
    as_eager(Column(), *((torch.randn(size, 1), torch.randn(6)) for size in (5, 3)))


class Pairs(nn.Module):
    """Pairs of rows, multiplied by rows of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([self.first(x), self.first(x).sin()], 1)
        return (pairs * self.second(y)).square().sum()


def test_a_batch_of_one_meets_a_fixed_size() -> None:
    """A batch of the size of a constant dimension may be followed by a batch of one row."""
    batches = [(torch.randn(size, 3), torch.randn(size, 3)) for size in (2, 1, 2)]
    as_eager(Pairs(), *batches)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_equal_sizes_are_left_as_they_are(family: str) -> None:
    """A language model's graph reads no sizes for its gradients."""
    module = wrapped(language_model(family, "sdpa"))
    module(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).backward()
    assert not [
        name
        for node in training_graph(module).node
        for name in node.input
        # The name of an input that the repair hides.
        if "_ortmodule_1" in name
    ]

"""Recurrent networks on ONNX Runtime: one export for all steps, and eager's values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(4, 5, batch_first=True, **settings)
        # A bidirectional layer returns both directions' outputs.
        self.last = nn.Linear(5 + 5 * bool(settings.get("bidirectional")), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(x)[0]).square().mean()


def steps(model: nn.Module, module: nn.Module, number: int = 8) -> list[float]:
    """Return the losses of `number` SGD steps on batches of two sizes and lengths."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    batches = torch.Generator().manual_seed(1)
    for step in range(number):
        # Two batch sizes and lengths in turns, for one graph.
        loss = module(torch.randn(3 + step % 2, 6 + step % 2, 4, generator=batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "bidirectional"),
    [(nn.GRU, False), (nn.LSTM, False), (nn.RNN, False), (nn.LSTM, True), (nn.GRU, True)],
)
def test_one_export_for_all_steps(kind: Any, bidirectional: bool) -> None:
    """An optimizer's step does not cause an export; the layer's list of weights stays the same."""
    model = Recurrent(kind, bidirectional=bidirectional)
    eager = copy.deepcopy(model)
    before = tally.exports
    losses = steps(model, wrapped(model))
    assert tally.exports - before == 1
    assert losses == pytest.approx(steps(eager, eager), rel=1e-5)


def test_an_rnn_without_gradient_is_refused() -> None:
    """The training export of an RNN names the setting that lets torch compute it."""
    with pytest.raises(
        Exception, match=r"ONNX Runtime has no gradient of RNN.*torch_operators='auto'"
    ):
        wrapped(Recurrent(nn.RNN), torch_operators="off")(torch.ones(1, 2, 4))


# ONNX's RNN has both functions, but no gradient in ORT.
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_an_rnn_is_evaluated(nonlinearity: str) -> None:
    """In evaluation ONNX's own RNN equals eager."""
    model = Recurrent(nn.RNN, nonlinearity=nonlinearity, num_layers=2).eval()
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        assert wrapped(model)(x).item() == pytest.approx(model(x).item(), rel=1e-5)


class Hidden(nn.Module):
    """A model with a weight in a list, which torch does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        # named_parameters does not list it, so the export makes it a constant.
        self.others = [nn.Parameter(torch.ones(1), requires_grad=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.others[0]).sum()


def test_a_weight_that_is_not_the_modules_is_followed() -> None:
    """An in-place change of an unregistered weight, a constant of the graph, causes an export."""
    model = Hidden()
    module = wrapped(model)
    x = torch.ones(2, 4)
    first = module(x).item()
    model.others[0].mul_(3)
    assert module(x).item() == pytest.approx(3 * first)

"""A forward pass that changes weights is refused with its line, and leaves the weights unchanged."""

from __future__ import annotations

import copy
import re
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
Change = Callable[[torch.Tensor, torch.Tensor], Any]


def assigned(a: torch.Tensor, b: torch.Tensor) -> None:
    b.data = b.data * 0.9 + a.data * 0.1


# Ways to write to a weight `b`, with and without an operator on the weight itself.
CHANGES: dict[str, Change] = {
    ".data = ...": assigned,
    ".data.copy_": lambda a, b: b.data.copy_(a.data),
    ".data.mul_": lambda a, b: b.data.mul_(0.9),
    "set_": lambda a, b: b.set_(b * 0.9),  # type: ignore[call-overload]
    "copy_": lambda a, b: b.copy_(a),
    "foreach": lambda a, b: torch._foreach_mul_([b], 0.9),
    "storage": lambda a, b: b.untyped_storage().copy_((b * 0.9).untyped_storage()),
}


class Moco(nn.Module):
    """Two encoders, of which the second follows the first within the forward pass."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.query = nn.Linear(8, 4)
        self.key = nn.Linear(8, 4)
        self.change = change
        # A momentum encoder has no gradient.
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for a, b in zip(self.query.parameters(), self.key.parameters()):
                self.change(a, b)
            target = self.key(x)
        return (self.query(x) - target).square().mean()


@pytest.mark.parametrize("change", CHANGES)
def test_a_pass_that_changes_weights_is_refused(change: str) -> None:
    """The message names the weight and the line of the change, and no weight has changed."""
    model = Moco(CHANGES[change])
    before = copy.deepcopy(model.state_dict())
    # A weight must also keep its memory, to which optimizers may refer.
    memory = [weight.data_ptr() for weight in model.parameters()]
    with pytest.raises(
        RuntimeError, match=rf"changes the weight key.weight at {re.escape(__file__)}:\d+"
    ):
        wrapped(model)(X)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert memory == [weight.data_ptr() for weight in model.parameters()]


class Projected(nn.Module):
    """A trained layer in front of a model that changes its weights."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moco = Moco(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moco(self.first(x))


def trained(module: Any, model: nn.Module) -> dict[str, Any]:
    losses = {}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        optimizer.zero_grad()
        losses[f"loss {step}"] = loss = module(X)
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("change", [".data = ...", ".data.mul_"])
def test_a_layer_that_runs_as_torch_may_change_its_weights(change: str) -> None:
    """A layer that runs as torch may change its weights, and the refusal proposes this."""
    model = Projected(CHANGES[change])
    with pytest.raises(RuntimeError, match=re.escape("torch_modules=['moco']")):
        wrapped(model)(X)
    compare(trained, model, torch_modules=["moco"])

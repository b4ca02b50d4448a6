"""ONNX Runtime's backward pass has autograd's gradients and errors."""

from __future__ import annotations

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


class Heads(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(torch.tanh(self.body(x)))
        return self.first(hidden), self.second(hidden)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "first": lambda first, second: first.square().mean(),
    "second": lambda first, second: second.square().mean(),
    "both": lambda first, second: (first * second).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_only_an_unused_output_reaches_has_no_gradient(loss: str) -> None:
    """A weight of an unused output has no gradient."""

    def decayed(module: Any, model: nn.Module) -> dict[str, Any]:
        # Weight decay would move a weight with a gradient of zeros, but not one without a gradient.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            LOSSES[loss](*module(X)).backward()
            optimizer.step()
        return {}

    compare(decayed, Heads())


def of(module: Any) -> Any:
    first, second = module(X)
    # The gradient of each head needs the other head's output.
    return (first * second).mean()


@pytest.mark.parametrize("name", ["first.weight", "second.weight", "norm.weight"])
def test_a_weight_changed_between_forward_and_backward_is_an_error(name: str) -> None:
    """A weight changed before the backward pass is an error that names it, as in eager PyTorch."""
    model = Heads()
    module = wrapped(model)
    for _ in range(2):
        # Eager PyTorch raises the same error.
        for run in (model, module):
            loss = of(run)
            with torch.no_grad():
                model.get_parameter(name).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
                loss.backward()
    assert name in str(raised.value)


# The input has no gradient, so the body's weight is not needed for one.
@pytest.mark.parametrize("name", ["body.weight", "body.bias", "first.bias"])
def test_a_weight_that_no_gradient_needs_may_change(name: str) -> None:
    """A weight that autograd does not save may change, and gradients are eager's."""

    def changing(module: Any, model: nn.Module) -> dict[str, Any]:
        loss = of(module)
        with torch.no_grad():
            model.get_parameter(name).add_(1)
        loss.backward()
        return {"loss": loss}

    compare(changing, Heads())


def test_an_input_changed_between_forward_and_backward_is_an_error() -> None:
    """An input changed before the backward pass is an error."""
    x = X.clone()
    module = wrapped(nn.Sequential(nn.Linear(8, 4)))
    loss = module(x).square().mean()
    # As a loop may use one buffer for all batches.
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_memory_between_forward_and_backward_is_an_error_and_between_passes_is_not() -> None:
    """`weight.data = ...` is an error before the backward pass, and allowed between passes."""
    model = Heads()
    module = wrapped(model)
    for name in ("first.weight", "body.bias"):
        model.get_parameter(name).data = model.get_parameter(name).data * 2
        of(module).backward()
    loss = of(module)
    # Equal values, but ONNX Runtime has the memory of the forward pass.
    model.first.weight.data = model.first.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"first\.weight, has another memory"):
        loss.backward()


def penalty(module: Any, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def test_a_loss_of_gradients_is_an_error() -> None:
    """A loss of gradients, such as WGAN-GP's penalty, is an error."""
    module = wrapped(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    # Without the error, this penalty would train nothing.
    loss = module(X).mean() + penalty(module, X.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="no derivative of its gradients"):
        loss.backward()


def test_first_derivatives_with_create_graph_are_eagers() -> None:
    """First derivatives with create_graph=True are eager's, as long as they are not derived again."""

    def created(module: Any, model: nn.Module) -> dict[str, Any]:
        module(X).square().mean().backward(create_graph=True)
        return {"penalty": penalty(module, X.clone().requires_grad_())}

    compare(created, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))

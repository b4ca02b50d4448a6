"""Values computed with gradients off have no gradient on ONNX Runtime; all others have eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.native import extensions
from ortmodule_tests.modules import Reverse, same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """Two layers, and the function that a test applies to them."""

    def __init__(self, called: Forward) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.called = called
        self.register_buffer("angles", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self, x)

    @torch.no_grad()
    def target(self, x: torch.Tensor) -> torch.Tensor:
        """Return a value without a gradient, from a layer with one."""
        return self.second(x)


# `target` and `mean` are used with gradients on, and have none themselves.
def a_block(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.second(x)
        mean = target.mean()
        target = target - mean
    return (model.first(x) - target).square().mean() + (model.second(x) * mean).sum()


# The second layer is used with gradients on, too, so its weight has one.
def a_decorator(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    return (hidden * model.target(hidden)).sum() + model.second(hidden).sum()


# The second layer is used with gradients off only, so its weight gets no gradient.
def never_trained(model: Two, x: torch.Tensor) -> torch.Tensor:
    return (model.first(x) * model.target(x)).sum()


# The mode is read, and set by calls instead of a with-block.
def a_call(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    target = model.second(hidden)
    torch.set_grad_enabled(before)
    return (hidden * target).sum() + model.second(x).sum()


# The inner block computes with gradients, from a value without one.
def gradients_on_inside(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.second(x)
        with torch.enable_grad():
            hidden = model.first(x) * target
    return (hidden * target).sum()


# Tensors of inference mode must be cloned before autograd may save them.
def inference(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        target = model.second(x)
        with torch.inference_mode(False):
            hidden = model.first(x)
    return (hidden * target.clone()).sum()


# Python decides by the mode: the graph is valid for one mode only.
def asking(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = 1.0 if torch.is_grad_enabled() else 2.0
    return model.first(x).sum() * scale + (model.second(x).sum() if torch.is_grad_enabled() else 0)


# Integers have no gradient, and need no detached copy.
def a_choice(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        labels = model.second(x).argmax(-1)
    return nn.functional.cross_entropy(model.first(x), labels)


# A change in the mode in which the tensor was made is allowed.
def in_place(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.second(x)
        target.mul_(2)
        filled = torch.zeros(4)
        filled.add_(target.mean(0))
    return (model.first(x) * target * filled).sum()


# Function modes do not see custom functions, so the export intercepts them.
def into_a_custom_function(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    return (Reverse.apply(model.target(x)) * Reverse.apply(hidden)).sum()  # type: ignore[no-untyped-call]


def out_of_a_custom_function(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = Reverse.apply(model.second(x))  # type: ignore[no-untyped-call]
    return (model.first(x) * target).sum()


CUSTOM = [into_a_custom_function, out_of_a_custom_function]
CASES = [
    a_block,
    a_decorator,
    never_trained,
    a_call,
    gradients_on_inside,
    inference,
    asking,
    a_choice,
    in_place,
]


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "a layer evaluates"])
@pytest.mark.parametrize("called", [*CASES, *CUSTOM])
def test_loss_and_gradients_are_eagers(called: Forward, evaluates: bool) -> None:
    """Loss and gradients equal eager's, also for a weight that is used only with gradients off."""
    if called in CUSTOM and extensions.reason_interop_is_unbuildable_or_empty():
        pytest.skip(extensions.reason_interop_is_unbuildable_or_empty())
    torch.manual_seed(0)
    model = Two(called)
    # As a teacher in evaluation mode; the export then keeps the mode of each layer.
    model.second.train(not evaluates)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    x = torch.randn(3, 4)
    losses = [each(x) for each in (module, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    same(model, eager)


def test_a_graph_without_anything_trained_there_stays_as_it_is() -> None:
    """Constants computed with gradients off, as in rotary embeddings, need no copy in the graph."""

    def rotated(model: Two, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            turned = (model.angles * torch.ones(4)).cos()
        return (model.first(x) * turned).sum()

    module = wrapped(Two(rotated))
    module(torch.ones(3, 4)).backward()
    # A detached copy is an ATen node.
    assert "ATen" not in {node.op_type for node in training_graph(module).node}


# Made with gradients on, changed with gradients off.
def changed_inside(model: Two, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    with torch.no_grad():
        hidden.clamp_(-1, 1)
    return hidden.sum()


# Made with gradients off, changed with gradients on.
def changed_outside(model: Two, x: torch.Tensor) -> torch.Tensor:
    target = model.target(x)
    target.add_(model.first(x))
    return target.sum()


@pytest.mark.parametrize("called", [changed_inside, changed_outside])
def test_a_change_in_place_across_the_border_is_refused(called: Forward) -> None:
    """A change in another grad mode than the tensor's is refused.

    PyTorch detects it by the tensor's version, which an exported graph does not have.
    """
    with pytest.raises(Exception, match="changed in place under"):
        wrapped(Two(called))(torch.ones(3, 4))


def test_a_weight_that_a_pass_changes_is_refused() -> None:
    """An embedding with max_norm is refused, because it renormalizes the rows that it reads."""

    def looked_up(model: Two, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x.long(), model.first.weight, max_norm=1.0).sum()

    with pytest.raises(Exception, match="the forward pass changes the weight first"):
        wrapped(Two(looked_up))(torch.ones(3, 4))

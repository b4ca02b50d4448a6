"""A tensor that a forward pass stores outside its result is never that of an earlier pass."""

from __future__ import annotations

import copy
import pickle
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ortmodule._internal.tracing.kept_tensors import StaleTensor
from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.programs import compare

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
# Places outside the model: a dictionary and an object of this module.
OUTSIDE: dict[str, Any] = {}
BOX = types.SimpleNamespace(loss=None)


class Auxiliary(nn.Module):
    """A model with a second loss, which a function of the test stores."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.keep = keep
        self.losses = []
        self.loss = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.first(x).softmax(-1)
        self.keep(self, shares.square().mean())
        return (shares * shares.log()).sum(-1).mean()


def attribute(model: Any, loss: torch.Tensor) -> None:
    model.loss = loss


def listed(model: Any, loss: torch.Tensor) -> None:
    model.losses = [loss]


def in_a_tuple(model: Any, loss: torch.Tensor) -> None:
    model.loss = {"all": (loss, loss * 2)}


def in_a_box(model: Any, loss: torch.Tensor) -> None:
    BOX.loss = loss


def in_a_global(model: Any, loss: torch.Tensor) -> None:
    OUTSIDE["loss"] = loss


def closure() -> tuple[Any, Any]:
    kept = None

    def keep(model: Any, loss: torch.Tensor) -> None:
        nonlocal kept
        kept = loss

    return keep, lambda model: kept


# A function that stores in a cell of its closure, and one that reads the cell.
in_a_cell, of_the_cell = closure()
# By place: a function that stores, one that reads, and the place's name in the error.
KEPT: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "attribute": (attribute, lambda model: model.loss, "the model's attribute loss"),
    "list": (listed, lambda model: model.losses[0], "the model's attribute losses"),
    "tuple": (in_a_tuple, lambda model: model.loss["all"][0], "the model's attribute loss"),
    "object": (in_a_box, lambda model: BOX.loss, "outside the model"),
    "global": (in_a_global, lambda model: OUTSIDE["loss"], "outside the model"),
    "cell": (in_a_cell, of_the_cell, "outside the model"),
}


@pytest.mark.parametrize("place", KEPT)
def test_a_kept_tensor_is_an_error_where_it_is_used(place: str) -> None:
    """Every use of a stored tensor is an error with its place and line.

    This is so in each pass, also after a pass of the model itself.
    """
    keep, read, where = KEPT[place]
    model = Auxiliary(keep)
    module = wrapped(model)
    for _ in range(2):
        module(X).backward()
        with pytest.raises(
            RuntimeError, match=rf"{where}.* keeps a tensor .* at {re.escape(__file__)}:\d+"
        ):
            (module(X) + read(model)).backward()
        # A pass of the model itself stores a real tensor again.
        model(X)
        # Exactly a Tensor, not the StaleTensor, which is a subclass.
        assert type(read(model)) is torch.Tensor


def trained(module: Any, model: nn.Module) -> dict[str, Any]:
    losses = {}
    for step in range(3):
        losses[f"loss {step}"] = loss = module(X)
        loss.backward()
    return losses


@pytest.mark.parametrize("place", KEPT)
def test_a_model_whose_kept_tensors_nobody_reads_trains_as_before(place: str) -> None:
    """Stored tensors that nobody reads change no value, and the model can be copied and pickled."""
    compare(trained, Auxiliary(KEPT[place][0]))
    if place == "attribute":
        model = Auxiliary(attribute)
        wrapped(model)(X)
        assert isinstance(copy.deepcopy(model).loss, StaleTensor)
        assert "model's attribute loss" in repr(pickle.loads(pickle.dumps(model.loss)))


def test_what_a_hook_keeps_is_an_error_where_it_is_used() -> None:
    """The error for a tensor that a hook stores names the hook's layer."""
    # The hook reaches this dictionary by its closure.
    kept: dict[str, torch.Tensor] = {}
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda layer, given, output: kept.update(output=output))
    wrapped(model)(X)
    with pytest.raises(RuntimeError, match="a hook of the layer 0"):
        kept["output"].square().mean()


class Table(nn.Module):
    """A model that computes a table from sizes once, and again for a longer batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.angles = None
        self.register_buffer("rates", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.angles is None or self.angles.shape[0] < x.shape[0]:
            self.angles = (torch.arange(x.shape[0])[:, None] * self.rates).cos()
        return (self.first(x) * self.angles[: x.shape[0]]).square().mean()


def test_a_table_of_constants_stays() -> None:
    """A table made of sizes and buffers alone stays, as in rotary embeddings and masks."""

    def trained(module: Any, model: nn.Module) -> dict[str, Any]:
        losses = {f"loss {rows}": module(X[:rows]) for rows in (4, 6, 5)}
        sum(losses.values()).backward()
        assert type(model.angles) is torch.Tensor
        return losses

    compare(trained, Table())


def pruned(net: nn.Sequential) -> None:
    prune.l1_unstructured(net[0], "weight", 0.3)


def normed(net: nn.Sequential) -> None:
    nn.utils.weight_norm(net[0])


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm. is deprecated")
@pytest.mark.parametrize("made", [pruned, normed])
def test_a_weight_that_a_hook_makes_of_weights_keeps_its_value(made: Callable[..., None]) -> None:
    """After each pass it is of the pass's weights: pruning goes on from it, as in eager PyTorch."""
    weights = []
    for on_ort in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        made(net)
        run = wrapped(net) if on_ort else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(4):
            run(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(net[0].weight.detach().clone())
            if made is pruned and step == 1:
                prune.l1_unstructured(net[0], "weight", 0.4)
    for ours, eager in zip(weights[4:], weights[:4]):
        torch.testing.assert_close(ours, eager)

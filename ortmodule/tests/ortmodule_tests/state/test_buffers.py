"""A model's buffers, modes and names on ORTModule: exactly eager's, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModuleError
from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
X = torch.randn(2, 4)


class Normalized(nn.Module):
    """A small network with batch normalization after a convolution and after a linear layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.first = nn.BatchNorm2d(4, **settings)
        self.linear = nn.Linear(4, 4)
        self.second = nn.BatchNorm1d(4, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(self.convolution(x))).mean((2, 3))
        # A cube, because a mean of normalized values would have no gradient.
        return self.second(self.linear(hidden)).pow(3).mean()


def images(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Each step has another number of values, which the correction of the variance needs.
    return [torch.randn(3 + step, 3, 6, 5 + step, generator=generator) * 3 for step in range(steps)]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "one frozen"])
def test_batch_normalization_is_eagers(frozen: bool) -> None:
    """Over five steps of different sizes, BatchNorm's statistics and counters are eager's."""
    model = Normalized()
    if frozen:
        model.first.eval()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for x in images(5):
        module(x).backward()
        eager(x).backward()
    same(model, eager, atol=1e-4)
    assert [int(n.num_batches_tracked) for n in (model.first, model.second)] == [
        # A frozen layer counts no batches.
        0 if frozen else 5,
        5,
    ]
    # The statistics have really moved.
    assert model.second.running_mean.abs().max() > 1e-3
    module.eval()
    eager.eval()
    with torch.no_grad():
        assert module(images(1)[0]).item() == pytest.approx(eager(images(1)[0]).item(), rel=1e-4)
    same(model, eager, atol=1e-4)


def test_statistics_of_one_value_are_an_error_as_in_pytorch() -> None:
    """A batch of one has no variance, and is an error as in PyTorch."""
    module = wrapped(nn.BatchNorm1d(4))
    # The graph is built by a batch of two.
    module(X).sum().backward()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(X[:1])


class Counter(nn.Module):
    """A model with a buffer that every pass changes, which ORT's graph would not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(x).sum()


class Twice(nn.Module):
    """A model that uses one batch normalization twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x) * 2).pow(3).sum()


@pytest.mark.parametrize(
    ("make", "x", "message"),
    [
        (
            lambda: Normalized(momentum=None),
            images(1)[0],
            "first is a BatchNorm with momentum=None",
        ),
        (Twice, X, "norm is a BatchNorm that runs more than once"),
        (Counter, X, "changes the model's steps"),
        # Evaluation changes this buffer too.
        (lambda: Counter().eval(), X, "changes the model's steps"),
    ],
    ids=["momentum", "twice", "counter", "counter in evaluation"],
)
def test_statistics_that_cannot_be_exact_are_refused(
    make: Callable[[], nn.Module], x: Any, message: str
) -> None:
    """A refusal names the layer or the buffer, and leaves the buffers unchanged."""
    model = make()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(ORTModuleError, match=message):
        # "off", or such a layer would run as torch.
        wrapped(model, torch_operators="off")(x)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


class Apart(nn.Module):
    """A model that uses one batch normalization twice, where neither use depends on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.linear(x))
        later = self.norm(self.linear(x * 2 + 1))
        # The sum needs the later use first.
        return 2 * later.sum() + first.square().sum()


def test_uses_of_a_layer_keep_their_order() -> None:
    """Running statistics are updated in the order of the forward pass, in any order of ORT's nodes."""
    torch.manual_seed(0)
    model = Apart()
    x = torch.randn(5, 4)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for _ in range(3):
        module(x).backward()
        eager(x).backward()
    for (name, found), expected in zip(model.named_buffers(), eager.buffers()):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, msg=name)
    for weight, reference in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(weight.grad, reference.grad, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ the model's own


def test_a_wrapped_model_answers_as_the_model() -> None:
    """A wrapped model has the model's names and attributes, and loading a state reaches the model."""
    model = Normalized()
    model.config = {"a": 1}  # type: ignore[assignment]
    module = wrapped(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(module, names)()] == [
            name for name, _ in getattr(model, names)()
        ]
    assert list(module.state_dict()) == list(model.state_dict())
    # Attributes that ORTModule does not have are the model's.
    assert module.config is model.config
    module.load_state_dict(
        {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    )
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_frozen_layers_stay_in_their_mode() -> None:
    """Wrapping and exporting leave every layer in its own mode."""
    model = Normalized()
    model.first.eval()
    module = wrapped(model)
    module(images(1)[0]).backward()
    assert [layer.training for layer in (model, model.first, model.second)] == [True, False, True]


@pytest.mark.parametrize(
    # Eager PyTorch updates the statistics twice in every case.
    ("where", "reentrant", "updates"),
    [("inside", False, 1), ("around", False, 1), ("around", True, 2)],
)
def test_a_checkpoint_around_batch_normalization(where: str, reentrant: bool, updates: int) -> None:
    """Statistics are updated once a pass, and twice only if the module itself is run again."""

    class Inside(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    norm = Inside(8) if where == "inside" else nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    module = wrapped(model)
    x = torch.randn(6, 8, requires_grad=True)
    out = module(x) if where == "inside" else checkpoint(module, x, use_reentrant=reentrant)
    out.square().mean().backward()
    assert norm.num_batches_tracked == updates

"""A model's buffers, modes and names on ORTModule: eager's exactly, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortlaunch.errors import EngineError
from tests.ort import needs_ort
from tests.ortmodule.modules import same, wrapped

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
        return self.second(self.linear(hidden)).pow(3).mean()


def images(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3 + step, 3, 6, 5 + step, generator=generator) * 3 for step in range(steps)]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "one frozen"])
def test_batch_normalization_is_eagers(frozen: bool) -> None:
    """Over five steps of different sizes: running mean, variance and the count of batches are eager's."""
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
        0 if frozen else 5,
        5,
    ]
    assert model.second.running_mean.abs().max() > 1e-3
    module.eval()
    eager.eval()
    with torch.no_grad():
        assert module(images(1)[0]).item() == pytest.approx(eager(images(1)[0]).item(), rel=1e-4)
    same(model, eager, atol=1e-4)


def test_statistics_of_one_value_are_an_error_as_in_pytorch() -> None:
    """A batch of one has no variance."""
    module = wrapped(nn.BatchNorm1d(4))
    module(X).sum().backward()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(X[:1])


class Counter(nn.Module):
    """A buffer that every pass changes, which no graph of ORT's would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(x).sum()


class Twice(nn.Module):
    """One batch normalization, used twice."""

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
        (lambda: Counter().eval(), X, "changes the model's steps"),
    ],
    ids=["momentum", "twice", "counter", "counter in evaluation"],
)
def test_statistics_that_cannot_be_exact_are_refused(
    make: Callable[[], nn.Module], x: Any, message: str
) -> None:
    """The reason names the layer or the buffer, and the buffers are as they were."""
    model = make()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(EngineError, match=message):
        wrapped(model, torch_operators="off")(x)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


class Apart(nn.Module):
    """One batch normalization, used twice; neither use needs the other, and their sum asks for the later one first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.linear(x))
        later = self.norm(self.linear(x * 2 + 1))
        return 2 * later.sum() + first.square().sum()


def test_uses_of_a_layer_keep_their_order() -> None:
    """Running statistics go from use to use as in the forward pass, in whatever order ORT takes nodes."""
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
    """Names of weights, buffers and layers, and attributes, are the model's; loading its state reaches it."""
    model = Normalized()
    model.config = {"a": 1}  # type: ignore[assignment]
    module = wrapped(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(module, names)()] == [
            name for name, _ in getattr(model, names)()
        ]
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.config is model.config
    module.load_state_dict(
        {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    )
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_frozen_layers_stay_in_their_mode() -> None:
    """Wrapping and exporting leave every layer in training or evaluation as it was."""
    model = Normalized()
    model.first.eval()
    module = wrapped(model)
    module(images(1)[0]).backward()
    assert [layer.training for layer in (model, model.first, model.second)] == [True, False, True]


@pytest.mark.parametrize(
    ("where", "reentrant", "updates"),
    [("inside", False, 1), ("around", False, 1), ("around", True, 2)],
)
def test_a_checkpoint_around_batch_normalization(where: str, reentrant: bool, updates: int) -> None:
    """Statistics are updated once a pass (eager PyTorch: twice), and twice where the module itself is run again."""

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

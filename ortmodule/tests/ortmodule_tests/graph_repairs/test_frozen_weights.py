"""Gradients through layers whose weights are frozen, all or some."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4, 2),
    "GRU": lambda: nn.GRU(4, 4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
}


class Twice(nn.Module):
    """A layer that is used twice, between trained layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            found = self.layer(h)
            h = found[0] if isinstance(found, tuple) else found
        return h.sin().sum()


def check(layer: nn.Module, frozen: str, *sizes: int) -> None:
    """Compare a step with eager's, with the parameters frozen whose name contains `frozen`."""
    model = Twice(layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    eager = copy.deepcopy(model)
    x = torch.randn(*sizes)
    loss, expected = wrapped(model)(x), eager(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    same(model, eager)


@pytest.mark.parametrize("frozen", ["layer", "layer.weight", "layer.bias", "first"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_gradient_passes_a_frozen_layer(name: str, frozen: str) -> None:
    """The gradient of the layer before, and those of the weights that are not frozen, are eager's."""
    check(LAYERS[name](), frozen, *((5, 4) if name == "GroupNorm" else (3, 2, 4)))


class Rms(nn.Module):
    """An RMSNorm that is written out, as models of transformers have it."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        # Gemma adds 1 to the weight.
        return (self.added + self.weight) * normalized if self.added else self.weight * normalized


class Written(nn.Module):
    """A LayerNorm that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.pow(2).mean(-1, keepdim=True)
        return self.weight * (centered / torch.sqrt(variance + 1e-5)) + self.bias


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(4),
    "LayerNorm without bias": lambda: nn.LayerNorm(4, bias=False),
    "LayerNorm written out": Written,
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "RMSNorm written out": Rms,
    "RMSNorm of Gemma": lambda: Rms(1.0),
}


@pytest.mark.parametrize("frozen", ["layer", "layer.weight", "layer.bias"])
@pytest.mark.parametrize("name", list(NORMS))
def test_a_frozen_normalization_is_used_twice(name: str, frozen: str) -> None:
    """The weights of a normalization that layers share have one gradient each, or none."""
    check(NORMS[name](), frozen, 5, 4)


class Branches(nn.Module):
    """Two normalizations of the same embedding, as in GPT-NeoX, whose sum a layer takes."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.embedding.weight.requires_grad_(False)
        self.norms = nn.ModuleList(norms)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if x.dtype == torch.int64 else x
        return sum((self.last(norm(x)).sin() for norm in self.norms), x).square().sum()


@pytest.mark.parametrize("given", ["ids", "batch"])
@pytest.mark.parametrize(
    "names",
    [
        ("LayerNorm", "LayerNorm"),
        ("BatchNorm", "LayerNorm"),
        ("RMSNorm written out", "LayerNorm"),
        ("LayerNorm written out", "BatchNorm"),
    ],
    ids=" and ".join,
)
def test_a_tensor_without_a_gradient_is_normalized_twice(
    names: tuple[str, str], given: str
) -> None:
    """A frozen embedding, or the batch itself, may be normalized by two layers."""
    model = Branches(*(NORMS[name]() for name in names))
    eager = copy.deepcopy(model)
    x = torch.arange(5) if given == "ids" else torch.randn(5, 4)
    loss, expected = wrapped(model)(x), eager(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    same(model, eager)

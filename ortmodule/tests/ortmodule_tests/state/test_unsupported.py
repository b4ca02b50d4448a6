"""Models that failed with raw errors of torch or ORT: they run as in eager, or are refused clearly."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ortmodule import ORTModule, Settings
from ortmodule_tests.modules import Layers, same
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Hyper(nn.Module):
    """A layer whose weights another layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(8, 72)
        self.core = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # 72 values: a weight of 8 x 8 and a bias of 8.
        made = self.generator(x.mean(0))
        return torch.func.functional_call(
            self.core, {"weight": made[:64].view(8, 8), "bias": made[64:]}, (x.tanh(),)
        )


class LowRank(nn.Module):
    """A parametrization that adds a product of two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(8, 2) / 10)
        self.right = nn.Parameter(torch.randn(2, 8) / 10)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.left @ self.right


class Cached(nn.Module):
    """A parametrized layer that is used twice, with its weight computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        parametrize.register_parametrization(self.layer, "weight", LowRank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.layer(self.layer(x).tanh())


class Quantized(nn.Module):
    """Fake quantization by channels, with scales that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        zeros = torch.zeros(8, dtype=torch.int32)
        scale = weight.detach().abs().amax(1) / 127
        weight = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -128, 127)
        return nn.functional.linear(x, weight, self.layer.bias)


class Diagonal(nn.Module):
    """A complex constant, as in state space models."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(8))
        self.turn = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A Python constant makes the tensor complex; the weights are real.
        return (torch.exp(-self.decay.exp() + 1j * self.turn) * x).real


class Turned(nn.Module):
    """Rotary angles as complex numbers that are no buffer, as in Meta's code of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        # The conjugate is computed where it is read, until then it is a mark.
        self.angles = torch.polar(torch.ones(4), torch.arange(4.0)).conj()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * self.angles).flatten(-2)[..., :3]


def compiled_layer() -> nn.Module:
    """Return a network with one layer compiled in place, and one compiled by a wrapper."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    # Backend eager needs no compiler.
    net[0].compile(backend="eager")
    net[2] = torch.compile(net[2], backend="eager")
    return net


# A model, and how it is wrapped.
EQUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "weights that a layer computes": (Hyper, ORTModule),
    "cached parametrizations": (Cached, ORTModule),
    "quantized by channels": (Quantized, ORTModule),
    "a complex constant": (Diagonal, ORTModule),
    "complex angles": (Turned, ORTModule),
    "compiled layers": (compiled_layer, ORTModule),
    "a compiled model": (Layers, lambda model: ORTModule(torch.compile(model, backend="eager"))),
    "an ORTModule that is compiled": (
        Layers,
        lambda model: torch.compile(ORTModule(model), backend="eager"),
    ),
}


# Dynamo warns of its own function, which ORT's manager calls.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.parametrize("name", EQUAL)
def test_loss_and_gradients_are_eagers(name: str) -> None:
    """Loss and gradients are eager's in one step, and with other weights in a second one."""
    make, wrap = EQUAL[name]
    model = make()
    eager = copy.deepcopy(model)
    module = wrap(model)
    for _ in range(2):
        losses = [call(X).square().mean() for call in (module, eager)]
        torch.testing.assert_close(*losses)
        for each, loss in zip((model, eager), losses):
            each.zero_grad()
            loss.backward()
        same(model, eager)
        with torch.no_grad():
            for each in (*model.parameters(), *eager.parameters()):
                # A graph that kept the first weights would differ in the second step.
                each.mul_(1.1)


@dataclasses.dataclass
class Batch:
    """An object with a tensor."""

    x: torch.Tensor


class Given(nn.Module):
    """A model of tensors, an object or a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, batch: Any, scale: Any = 1.0) -> torch.Tensor:
        return self.norm(self.layer(getattr(batch, "x", batch)) * float(scale))


class Derived(Given):
    """A model whose loss contains a derivative."""

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)[0]


class Forces(Given):
    """A layer that derives by its input as it is given."""

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)[0]


class Frozen(Forces):
    """Such a layer with frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Transformed(Given):
    """A layer that derives by torch.func, for each row and in a direction."""

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        def energy(row: torch.Tensor) -> torch.Tensor:
            return self.layer(row).tanh().sum()

        rows: torch.Tensor = torch.func.vmap(torch.func.grad(energy))(x)
        return rows + torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1]


class Sparse(nn.Module):
    """An embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x.long().clamp(0, 7))


class Complex(nn.Module):
    """A model with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()


class Calling(Given):
    """A model that computes with a layer's output and its input."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return self.function(self.layer(x), x)


def filled() -> nn.Module:
    return Calling(lambda h, x: h * torch.full((8,), True))


def in_pairs() -> nn.Module:
    return Calling(lambda h, x: torch.stack([pair.mean() for pair in h.split(2)]))


def squeezed() -> nn.Module:
    # Removes the dimension in the first batch only.
    return Calling(lambda h, x: h.squeeze(0).exp())


def doubled() -> nn.Module:
    return Calling(
        lambda h, x: nn.functional.interpolate(h[None, None], scale_factor=2, mode="area")
    )


def autocast(module: Any) -> torch.Tensor:
    """Return a pass under autocast to bfloat16, as Trainer's bf16=True runs it."""
    with torch.autocast("cpu", torch.bfloat16):
        return module(X)


# A model, the calls that fail, and a pattern of the message.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str]] = {
    "a dataclass": (
        Given,
        lambda module: module(Batch(X)),
        r"is given <class .*Batch'> for input batch: an ORTModule",
    ),
    "an object that is returned": (
        lambda: Calling(lambda h, x: Batch(h)),
        lambda module: module(X),
        r"returns <class .*Batch'>: an ORTModule .*use_cache = False",
    ),
    "a NumPy number": (
        Given,
        lambda module: module(X, numpy.float32(2)),
        r"numpy.float32'> for input scale.*float\(",
    ),
    "a derivative": (
        Derived,
        lambda module: module(X),
        r"calls torch.autograd.grad, .*torch_modules",
    ),
    "a derivative of torch.func": (
        lambda: Calling(lambda h, x: torch.func.vjp(torch.tanh, h)[1](x)[0]),
        lambda module: module(X),
        r"a derivative of torch.func",
    ),
    "a generator": (
        lambda: Calling(lambda h, x: h * torch.rand(8, generator=torch.Generator())),
        lambda module: module(X),
        r"a generator of its own.* leave out generator=",
    ),
    "sparse gradients": (
        Sparse,
        lambda module: module(X),
        r"^words has a sparse gradient.* write sparse=False",
    ),
    "complex weights": (
        Complex,
        lambda module: module(X),
        r"^weight is complex.* torch.view_as_complex",
    ),
    "a bool for a number": (
        filled,
        lambda module: module(X),
        r"^full is called with a Python bool.* write 1 or 0",
    ),
    "another number of parts": (
        in_pairs,
        lambda module: (module(X), module(X[:4])),
        r"^split.* number of parts than",
    ),
    "another number of parts, of which one is used": (
        lambda: Calling(lambda h, x: h.split(2)[-1].exp()),
        lambda module: (module(X), module(X[:1])),
        r"^split.* number of parts than",
    ),
    "a size that is 1 no more": (
        squeezed,
        lambda module: (module(X[:1]), module(X)),
        r"^squeeze is given a dimension",
    ),
    "a size as a float": (
        doubled,
        lambda module: module(X),
        r"reaches torch's operator as a float: give the size",
    ),
    "bfloat16": (
        lambda: Given().bfloat16(),
        lambda module: module(X.bfloat16()),
        r"not bfloat16: train in float32",
    ),
    "float64": (
        lambda: Given().double(),
        lambda module: module(X.double()),
        r"not float64: train in float32",
    ),
    "autocast": (
        Given,
        autocast,
        r"not bfloat16: train in float32 without autocast \(bf16=False\)",
    ),
}


class Around(nn.Module):
    """A model with a layer that the graph cannot hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        # A weight without use has zeros in place of None.
        del inner.norm
        self.before, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.last(x).mean() + self.inner(x).square().mean()


def drawing() -> nn.Module:
    return Calling(lambda h, x: h * random.random())


@pytest.mark.parametrize("make", [Derived, Forces, Frozen, Transformed, in_pairs, drawing])
def test_the_remedy_of_a_layer_that_runs_as_torch(make: Callable[[], nn.Module]) -> None:
    """A refusal names the setting under which the model trains as in eager."""
    model = Around(make())
    batches = (X[:1], X)

    def losses(module: Any) -> list[float]:
        random.seed(0)
        found = [module(x) for x in batches]
        sum(found).backward()
        return [loss.item() for loss in found]

    with pytest.raises(RuntimeError, match=r"torch_modules=\['PATH OF THE LAYER'\]"):
        losses(ORTModule(copy.deepcopy(model)))
    eager = copy.deepcopy(model)
    module = ORTModule(model, Settings(torch_modules=["inner"]))
    assert losses(module) == pytest.approx(losses(eager), rel=1e-6)
    same(model, eager)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_cause_and_remedy(name: str) -> None:
    """A refusal names cause and remedy in one sentence, for a model that eager runs."""
    make, call, sentence = REFUSED[name]
    call(make())
    with pytest.raises(RuntimeError, match=sentence) as caught:
        call(ORTModule(make()))
    # The raw errors have many lines.
    assert "\n" not in str(caught.value)

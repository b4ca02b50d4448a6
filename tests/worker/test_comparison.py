"""One batch through two modules on the same weights: what counts as a difference, and that nothing is left behind."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.errors import EngineError
from ortlaunch.worker.comparison import LIMITS, compare, dropouts, without_dropout

BATCH = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(3))}


class Net(nn.Module):
    """Linear layers, batch statistics, dropout as a module and as a number, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.second, self.unused, self.frozen = nn.Linear(8, 1), nn.Linear(2, 2), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.attention_dropout = 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.frozen(self.first(x)))))
        hidden = nn.functional.dropout(hidden, self.attention_dropout, self.training)
        return self.second(hidden).square().mean()


class Spoilt(torch.autograd.Function):
    """The number itself, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def spoilt(net: Net, factor: float) -> Any:
    """An engine that computes the loss well, and a wrong gradient for the last layer's weight."""

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.norm(net.frozen(net.first(x))))
        weight = Spoilt.apply(net.second.weight, factor)
        return (hidden @ weight.T + net.second.bias).square().mean()

    return run


def test_a_module_is_equal_to_itself_with_dropout_off() -> None:
    """Every trained parameter is compared, and none differs, though the model has dropout in training mode."""
    net = Net()
    found = compare(net, net, BATCH)
    assert found.largest == 0
    assert {d.name for d in found.gradients} == {n for n, p in net.named_parameters() if p.requires_grad}
    with without_dropout(net):
        assert found.loss == net(**BATCH).item() != pytest.approx(0)
    assert net.training


def test_nothing_is_left_behind() -> None:
    """Gradients, batch statistics, random numbers and dropout are afterwards what they were."""
    net = Net()
    net(**BATCH).backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    buffers, random = copy.deepcopy(dict(net.named_buffers())), torch.get_rng_state()
    compare(net, lambda x: net(x + torch.rand(1)), BATCH)
    assert all((p.grad is None) == (gradients[n] is None) for n, p in net.named_parameters())
    assert all(g is None or torch.equal(g, net.get_parameter(n).grad) for n, g in gradients.items())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)
    assert (net.drop.p, net.attention_dropout) == (0.3, 0.2)


def test_both_passes_begin_with_the_same_buffers() -> None:
    """A module whose loss depends on statistics that a pass changes is equal to itself."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return (self.weight * x).mean() * self.passes

    module = Running()
    assert compare(module, module, BATCH).largest == 0
    assert module.passes == 0


def test_a_wrong_gradient_behind_a_right_loss_is_named() -> None:
    """A gradient that is 1 % too large is 0.01 apart; the loss is not."""
    net = Net()
    found = compare(net, spoilt(net, 1.01), BATCH)
    assert found.loss_difference < 1e-6
    assert found.gradients[0].name == "second.weight"
    assert found.gradients[0].value == pytest.approx(0.01, rel=1e-3)
    assert found.gradients[0].norm == pytest.approx(1.01 * found.gradients[0].reference_norm, rel=1e-5)
    assert found.gradients[1].value < 1e-5
    assert found.largest == found.gradients[0].value


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_an_infinite_difference(factor: float) -> None:
    """In a gradient, and in the loss."""
    net = Net()
    found = compare(net, spoilt(net, factor), BATCH)
    assert (found.gradients[0].name, found.gradients[0].value) == ("second.weight", math.inf)
    assert compare(net, lambda x: net(x) * factor, BATCH).loss_difference == math.inf


def test_a_missing_gradient_is_one_of_zeros() -> None:
    """Where the engine has none, or has one that PyTorch has not, it differs; none on both sides is equal."""
    net = Net()

    def lacking(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.norm(net.frozen(net.first(x))))
        return (hidden @ net.second.weight.detach().T + net.second.bias).square().mean()

    def more(x: torch.Tensor) -> torch.Tensor:
        return net(x) + (net.unused.bias - net.unused.bias.detach()).sum()

    assert compare(net, lacking, BATCH).gradients[0][:3] == ("second.weight", 1.0, 0.0)
    found = compare(net, more, BATCH)
    assert found.gradients[0].name == "unused.bias"
    assert found.gradients[0].reference_norm == 0
    assert found.gradients[0].value > 1


def test_rounding_of_a_zero_gradient_is_no_difference() -> None:
    """A bias before softmax has no gradient but for rounding, which its own norm would make a difference of 100 %."""

    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.softmax(self.linear(x) + self.shift, -1) * x).square().sum()

    class Apart(Softmax):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x) + self.shift
            powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True) - 0.7)
            return (powers / powers.sum(-1, keepdim=True) * x).square().sum()

    module = Softmax()
    engine = Apart()
    engine.linear, engine.shift = module.linear, module.shift
    found = compare(module, engine, BATCH)
    shift = next(d for d in found.gradients if d.name == "shift")
    assert abs(shift.norm - shift.reference_norm) > 0.1 * shift.reference_norm
    assert found.largest < 1e-4


def test_a_model_with_randomness_of_its_own_is_refused() -> None:
    """Two passes of it are never the same."""

    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    net = Noisy()
    with pytest.raises(EngineError, match="draws random numbers"):
        compare(net, net, BATCH)


def test_a_compiled_model_is_compared_with_itself_uncompiled() -> None:
    """The reference is called past torch.compile."""
    net = Net()
    calls = []
    net._compiled_call_impl = lambda **batch: calls.append(1) or Net.forward(net, **batch)  # as Module.compile does
    assert compare(net, net, BATCH).largest == 0
    assert calls == [1]


def test_half_precision_by_autocast() -> None:
    """bf16 differs from itself by nothing, and float32 from bf16 by less than its tolerance and more than fp32's."""
    net = Net()
    assert compare(net, net, BATCH, precision="bf16", autocast=True).largest == 0

    def exact(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return net(x)

    found = compare(net, exact, BATCH, precision="bf16", autocast=True)
    assert LIMITS["fp32"].tolerance < found.largest < LIMITS["bf16"].tolerance


def test_the_scale_of_fp16_is_taken_back() -> None:
    """Norms are those of the loss itself."""
    net = Net()
    plain, scaled = (compare(net, spoilt(net, 1.01), BATCH, precision=name) for name in ("fp32", "fp16"))
    assert scaled.gradients[0].norm == pytest.approx(plain.gradients[0].norm, rel=1e-5)
    assert scaled.gradients[0].value == pytest.approx(plain.gradients[0].value, rel=1e-3)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_every_dropout_of_a_transformers_model_is_found(family: str) -> None:
    """Modules, numbers of attention layers, and the config."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
             "num_attention_heads": 2}  # fmt: skip
    if family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.2))
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, attention_dropout=0.2))
    found = {(type(owner).__name__, name) for owner, name, _ in dropouts(model)}
    expected = {
        "bert": {("Dropout", "p"), ("BertConfig", "attention_probs_dropout_prob")},
        "llama": {("LlamaAttention", "attention_dropout"), ("LlamaConfig", "attention_dropout")},
    }
    assert expected[family] <= found
    before = dropouts(model)
    with without_dropout(model):
        assert dropouts(model) == []
    assert dropouts(model) == before

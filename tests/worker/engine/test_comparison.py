"""The comparison of two modules with the same weights: its differences, and its lack of effects."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import EngineError
from ortlaunch.tables.precisions import PRECISIONS
from ortlaunch.worker.engine.comparison import (
    compare_passes_replaying_random_numbers_if_drawn,
    disable_dropout,
    evaluation_losses_or_none,
    owner_name_and_ratio_of_active_dropouts,
    run_and_compare_passes,
)

BATCH = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(3))}


class Net(nn.Module):
    """A model with BatchNorm, two kinds of dropout, a frozen layer and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.attention_dropout = 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.frozen(self.first(x)))))
        hidden = nn.functional.dropout(hidden, self.attention_dropout, self.training)
        return self.second(hidden).square().mean()


class Spoilt(torch.autograd.Function):
    """The identity with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def spoilt(net: Net, factor: float) -> Any:
    """Return an engine with a correct loss and a wrong gradient of the last layer's weight."""

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.norm(net.frozen(net.first(x))))
        weight = Spoilt.apply(net.second.weight, factor)
        return (hidden @ weight.T + net.second.bias).square().mean()

    return run


def test_a_module_is_equal_to_itself_with_dropout_off() -> None:
    """A model with dropout is equal to itself in every trained parameter."""
    net = Net()
    found = run_and_compare_passes(net, net, BATCH)
    assert found.largest_difference == 0
    assert {d.name for d in found.gradients} == {
        n for n, p in net.named_parameters() if p.requires_grad
    }
    with disable_dropout(net):
        assert found.loss == net(**BATCH).item() != pytest.approx(0)
    assert net.training


def test_nothing_is_left_behind() -> None:
    """A comparison changes no gradient, batch statistics, random state or dropout."""
    net = Net()
    net(**BATCH).backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()
    }
    buffers = copy.deepcopy(dict(net.named_buffers()))
    random = torch.get_rng_state()
    # The engine draws a random number, too.
    run_and_compare_passes(net, lambda x: net(x + torch.rand(1)), BATCH)
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
    assert run_and_compare_passes(module, module, BATCH).largest_difference == 0
    assert module.passes == 0


def test_a_wrong_gradient_behind_a_right_loss_is_named() -> None:
    """A gradient that is 1 % too large has a difference of 0.01; the loss has none."""
    net = Net()
    found = run_and_compare_passes(net, spoilt(net, 1.01), BATCH)
    assert found.loss_difference < 1e-6
    assert found.gradients[0].name == "second.weight"
    assert found.gradients[0].value == pytest.approx(0.01, rel=1e-3)
    assert found.gradients[0].norm == pytest.approx(
        1.01 * found.gradients[0].reference_norm, rel=1e-5
    )
    assert found.gradients[1].value < 1e-5
    assert found.largest_difference == found.gradients[0].value


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_an_infinite_difference(factor: float) -> None:
    """A gradient or loss that is not finite has an infinite difference."""
    net = Net()
    found = run_and_compare_passes(net, spoilt(net, factor), BATCH)
    assert (found.gradients[0].name, found.gradients[0].value) == ("second.weight", math.inf)
    assert run_and_compare_passes(net, lambda x: net(x) * factor, BATCH).loss_difference == math.inf


def test_a_missing_gradient_is_one_of_zeros() -> None:
    """A gradient that only one side has differs; a gradient that both lack does not."""
    net = Net()

    # The detached weight gets no gradient.
    def lacking(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.norm(net.frozen(net.first(x))))
        return (hidden @ net.second.weight.detach().T + net.second.bias).square().mean()

    # The unused bias gets a gradient, and the loss does not change.
    def more(x: torch.Tensor) -> torch.Tensor:
        return net(x) + (net.unused.bias - net.unused.bias.detach()).sum()

    assert run_and_compare_passes(net, lacking, BATCH).gradients[0][:3] == (
        "second.weight",
        1.0,
        0.0,
    )
    found = run_and_compare_passes(net, more, BATCH)
    assert found.gradients[0].name == "unused.bias"
    assert found.gradients[0].reference_norm == 0
    assert found.gradients[0].value > 1


def test_rounding_of_a_zero_gradient_is_no_difference() -> None:
    """Rounding in a gradient that is zero in theory is no difference."""

    # A bias before softmax has only rounding as gradient: relative to its own norm, the difference
    # would be 100 %.

    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.softmax(self.linear(x) + self.shift, -1) * x).square().sum()

    # The same function by other operations, which round differently.
    class Apart(Softmax):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x) + self.shift
            powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True) - 0.7)
            return (powers / powers.sum(-1, keepdim=True) * x).square().sum()

    module = Softmax()
    engine = Apart()
    engine.linear = module.linear
    engine.shift = module.shift
    found = run_and_compare_passes(module, engine, BATCH)
    shift = next(d for d in found.gradients if d.name == "shift")
    assert abs(shift.norm - shift.reference_norm) > 0.1 * shift.reference_norm
    assert found.largest_difference < 1e-4


class Moving(nn.Module):
    """Two encoders as in MoCo: the second follows the first by `.data =` in the forward pass."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(8, 1)
        self.key = nn.Linear(8, 1)
        self.moves = moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.key.weight.data = self.key.weight.data * 0.9 + self.query.weight.data * 0.1
            self.key.bias.data.mul_(0.5)
        return (self.query(x) - self.key(x)).square().mean()


def test_weights_that_a_pass_moves_are_put_back_and_compared() -> None:
    """Weights that a pass changes are restored and compared, even if the loss is equal."""
    net = Moving()
    stays = Moving(moves=False)
    stays.query = net.query
    stays.key = net.key
    before = copy.deepcopy(net.state_dict())
    storage = net.key.weight.data_ptr()
    assert run_and_compare_passes(net, net, BATCH).largest_difference == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.key.weight.data_ptr() == storage

    # The engine computes with the moved weights, but does not store them.
    def late(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            moved = net.key.weight * 0.9 + net.query.weight * 0.1, net.key.bias * 0.5
        weight, bias = (p + (m - p).detach() for p, m in zip((net.key.weight, net.key.bias), moved))
        return (net.query(x) - nn.functional.linear(x, weight, bias)).square().mean()

    found = run_and_compare_passes(net, late, BATCH)
    assert max(found.loss_difference, found.gradient_difference) < 1e-6
    assert {(each.name, each.value) for each in found.state} == {
        ("key.weight", 1.0),
        ("key.bias", 1.0),
    }
    assert found.largest_difference == 1.0
    assert run_and_compare_passes(net, stays, BATCH).loss_difference > 0.01


@pytest.mark.parametrize("momentum", [0.1, 0.2])
def test_statistics_that_a_pass_leaves_are_compared(momentum: float) -> None:
    """An engine with another momentum of BatchNorm differs in its buffers, which are restored."""
    net = Net()
    other = Net()
    other.load_state_dict(net.state_dict())
    other.norm.momentum = momentum
    # Both modules share parameters and buffers, as a model and its engine do.
    for name in ("first", "second", "unused", "frozen"):
        setattr(other, name, getattr(net, name))
    other.norm.weight, other.norm.bias = net.norm.weight, net.norm.bias
    other.norm._buffers = net.norm._buffers
    other.drop.p = other.attention_dropout = 0.0
    found = run_and_compare_passes(net, other, BATCH)
    assert (found.state_difference > 0.5) == (momentum != 0.1)
    assert found.gradient_difference < 1e-6


class BeforeNorm(nn.Module):
    """A convolution before BatchNorm: the gradient of its bias is zero except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))).square().mean()


def off_by(net: BeforeNorm, error: float) -> Any:
    """Return an engine whose gradient of the bias has an error of this norm."""

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = net(x)
        # The bias has 8 elements, which share the error equally.
        return loss + error / math.sqrt(8) * (net.conv.bias - net.conv.bias.detach()).sum()

    return run


@pytest.mark.parametrize(
    ("roundings", "judgement"), [(0, "equal"), (5, "rounding"), (100, "wrong")]
)
def test_float64_tells_rounding_from_an_error(roundings: int, judgement: str) -> None:
    """A few roundings of eager PyTorch are no difference; many times as much is one."""
    net = BeforeNorm()
    tolerance = 1e-7
    images = {"x": torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1)) * 30 + 100}
    own = next(
        each
        for each in run_and_compare_passes(net, net, images).gradients
        if each.name == "conv.bias"
    )
    # This norm is eager's own rounding, because the exact gradient is zero.
    assert 0 < own.reference_norm < 1e-8
    found = run_and_compare_passes(
        net, off_by(net, roundings * own.reference_norm), images, tolerance=tolerance
    )
    bias = next(each for each in found.gradients if each.name == "conv.bias")
    assert not found.not_judged
    assert found.rounding == (["conv.bias"] if judgement == "rounding" else [])
    assert (bias.value > tolerance, bias.rounding) == (
        judgement != "equal",
        judgement == "rounding",
    )
    assert (found.largest_difference > tolerance) == (judgement == "wrong")
    assert net.conv.bias.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_float64_derives_only_the_gradients_in_question() -> None:
    """The pass in float64 keeps no others: all of them take twice the bytes of the weights."""
    net = BeforeNorm()
    images = {"x": torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))}
    with mock.patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as derive:
        found = run_and_compare_passes(net, off_by(net, 1.0), images)
    assert [each.name for each in found.gradients if each.value > 1e-4] == ["conv.bias"]
    derived = [len(call.args[1]) for call in derive.call_args_list]
    # In float64 torch calls the function once more, by way of its mode.
    assert (derived[:2], set(derived[2:])) == ([6, 6], {1})


def test_an_engine_that_is_nearer_to_float64_is_right() -> None:
    """An engine that is nearer to float64 than PyTorch has only rounding."""

    # PyTorch loses digits here, in a sum that is a hundred thousand times larger than its terms.

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x * self.weight + 1e5) - 1e5).square().mean()

    net = Losing()
    found = run_and_compare_passes(net, lambda x: (x * net.weight).square().mean(), BATCH)
    assert found.gradients[0].value > 0.001
    assert found.rounding == ["loss", "weight"]
    assert found.largest_difference == 0


def test_a_model_whose_passes_differ_is_no_rounding() -> None:
    """The differences of a model whose passes differ do not count as rounding."""

    # Such a model differs from itself in float64 as much as an engine with the values of one pass.

    class Counting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes = getattr(self, "passes", 0) + 1
            return super().forward(x) * self.passes

    net = Counting()
    found = run_and_compare_passes(net, lambda x: Net.forward(net, x), BATCH)
    assert (
        run_and_compare_passes(net, lambda x: Net.forward(net, x), BATCH).largest_difference > 0.1
    )
    assert found.rounding == []


class Product(torch.autograd.Function):
    """A product, of which the weight's gradient is found by this function alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


def by_function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Product.apply(x, weight)


@torch.jit.script
def by_script(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that the pass in float64 cannot follow: its float64 gradient is None."""
    return x * weight


@pytest.mark.parametrize("product", [by_function, by_script])
def test_a_missing_gradient_is_no_rounding(product: Any) -> None:
    """An engine that leaves a gradient out differs, also where float64 has none either."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, lost: bool = False) -> torch.Tensor:
            return super().forward(product(x, self.scale.detach() if lost else self.scale))

    net = Scaled()
    net.drop.p = net.attention_dropout = 0.0
    found = run_and_compare_passes(net, lambda x: net(x, lost=True), BATCH)
    assert (found.largest_difference, found.rounding) == (1, [])
    # The exact gradient shows an error of the engine; without one there is no judgement.
    assert ("scale" in found.not_judged) == (product is by_script)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_judges_nothing(factor: float) -> None:
    """Where PyTorch's loss is nan, too, there is no verdict; where it alone is, the two differ."""
    net = Net()
    net.drop.p = net.attention_dropout = 0.0

    class Endless(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * factor

    endless = Endless()
    endless.drop.p = endless.attention_dropout = 0.0
    for name, module in net.named_children():
        setattr(endless, name, module)
    found = run_and_compare_passes(endless, endless, BATCH)
    assert (found.largest_difference, found.gradients) == (0, ())
    assert found.not_judged == f"the loss is {factor} in plain PyTorch, too"
    assert run_and_compare_passes(endless, net, BATCH).largest_difference == math.inf


def test_evaluation_is_compared_too() -> None:
    """A model that computes otherwise in evaluation is found; modes and statistics stay."""

    class Pooled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if self.training else 2)

    class Drawing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    assert evaluation_losses_or_none(Drawing(), Drawing(), BATCH, None) is None
    net = Pooled()
    net.norm.eval()
    statistics = net.norm.running_mean.clone()
    losses = evaluation_losses_or_none(net, net, BATCH, None)
    assert losses is not None
    assert losses.engine == losses.reference
    plain = Net()
    plain.load_state_dict(net.state_dict())
    losses = evaluation_losses_or_none(net, plain, BATCH, None)
    assert losses is not None
    assert losses.reference == pytest.approx(2 * losses.engine)
    assert (net.training, net.norm.training, plain.training) == (True, False, True)
    assert torch.equal(net.norm.running_mean, statistics)


def test_what_cannot_run_in_float64_is_not_judged() -> None:
    """A model that cannot run in float64 keeps its difference, with the reason."""

    class Scripted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.jit.script(self.first)

    net = Scripted()
    found = run_and_compare_passes(net, lambda x: net(x) * 1.01, BATCH)
    assert found.largest_difference == pytest.approx(0.01, rel=1e-2)
    assert "dtype" in found.not_judged


def test_a_reentrant_checkpoint_is_compared() -> None:
    """A model with reentrant checkpoints is compared without writing `.grad` or calling hooks."""

    # Reentrant checkpoints support backward() only, not autograd.grad.

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    net = Checkpointed()
    plain = Net()
    plain.norm = net.norm = nn.LayerNorm(8)
    plain.attention_dropout = 0.0
    for name, module in plain.named_children():
        setattr(net, name, module)
    called: list[int] = []
    net.first.weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    batch = {"x": BATCH["x"].clone().requires_grad_()}
    found = run_and_compare_passes(net, plain, batch)
    assert found.largest_difference < 1e-6
    assert found.gradients[0].reference_norm > 0
    assert run_and_compare_passes(net, lambda x: plain(x) * 1.01, batch).not_judged == ""
    assert all(parameter.grad is None for parameter in net.parameters())
    assert called == []


def test_a_model_with_randomness_of_its_own_is_compared() -> None:
    """A model that draws by any function of torch is compared, if the engine draws the same."""

    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.gumbel_softmax(x))

    net = Noisy()
    net.drop.p = net.attention_dropout = 0.0
    before = torch.get_rng_state()
    assert run_and_compare_passes(net, net, BATCH).largest_difference == 0
    assert run_and_compare_passes(
        net, lambda x: net(x) * 1.01, BATCH
    ).largest_difference == pytest.approx(0.01, rel=1e-2)
    with pytest.raises(EngineError, match="draws random numbers"):
        run_and_compare_passes(net, drawing_otherwise(net), BATCH)
    assert torch.equal(torch.get_rng_state(), before)


def drawing_otherwise(net: nn.Module) -> Any:
    """Return an engine that draws other numbers than PyTorch."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return net(x)

    return run


class Sampling(nn.Module):
    """A model that draws in every way that is recorded, and with `gamma` in one that is not."""

    def __init__(self, gamma: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)
        self.gamma = gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.first(x)
        spread = self.second(x).exp()
        hidden = (
            mean
            + spread * torch.randn_like(mean)
            + torch.distributions.Normal(0.0, 1.0).rsample((8,))
        )
        hidden = nn.functional.dropout(hidden, 0.3, self.training) + torch.empty(8).uniform_()
        if self.gamma:
            hidden = hidden * torch.distributions.Gamma(spread, 1.0).rsample()
        return (
            (hidden[torch.randint(6, (4,))] * torch.bernoulli(torch.full((8,), 0.5)))
            .square()
            .mean()
        )


def test_recorded_random_numbers_are_given_to_both() -> None:
    """A model with random numbers is equal to itself, and the random state does not change."""
    net = Sampling()
    before = torch.get_rng_state()
    found = compare_passes_replaying_random_numbers_if_drawn(
        net, drawing_otherwise(net), BATCH, lambda model: model
    )
    # The draws are randn_like, Normal, dropout, uniform_, randint and bernoulli.
    assert (found.largest_difference, found.draws) == (0, 6)
    assert {each.name for each in found.gradients} == {name for name, _ in net.named_parameters()}
    assert torch.equal(torch.get_rng_state(), before)
    wrong = compare_passes_replaying_random_numbers_if_drawn(
        net, drawing_otherwise(net), BATCH, lambda model: lambda draws, x: model(draws, x=x) * 1.01
    )
    assert wrong.largest_difference == pytest.approx(0.01, rel=1e-2)
    assert wrong.not_judged == ""


def test_random_numbers_that_cannot_be_recorded_are_refused() -> None:
    """A model with Gamma variates is refused."""
    # A Gamma variate has a gradient, which a recorded tensor would lack.
    net = Sampling(gamma=True)
    with pytest.raises(EngineError, match="cannot be given to both"):
        compare_passes_replaying_random_numbers_if_drawn(
            net,
            drawing_otherwise(net),
            BATCH,
            lambda model: lambda **batch: (torch.rand(1), model(**batch))[1],
        )
    # The same numbers show the difference.
    off = compare_passes_replaying_random_numbers_if_drawn(
        net, lambda x: net(x) * 1.01, BATCH, None
    )
    assert off.largest_difference == pytest.approx(0.01, rel=1e-2)


def test_a_compiled_model_is_compared_with_itself_uncompiled() -> None:
    """The forward of the reference is called without torch.compile."""
    net = Net()
    calls = []
    # As Module.compile sets it.
    net._compiled_call_impl = lambda **batch: calls.append(1) or Net.forward(net, **batch)
    assert run_and_compare_passes(net, net, BATCH).largest_difference == 0
    assert calls == [1]


def test_half_precision_by_autocast() -> None:
    """A bf16 pass equals itself, and differs from float32 within the tolerance of bf16."""
    net = Net()
    assert (
        run_and_compare_passes(
            net, net, BATCH, precision="bf16", uses_autocast=True
        ).largest_difference
        == 0
    )

    def exact(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return net(x)

    found = run_and_compare_passes(net, exact, BATCH, precision="bf16", uses_autocast=True)
    assert PRECISIONS["fp32"].tolerance < found.largest_difference < PRECISIONS["bf16"].tolerance


def test_the_scale_of_fp16_is_taken_back() -> None:
    """Norms of fp16 gradients do not contain the loss scale."""
    net = Net()
    plain, scaled = (
        run_and_compare_passes(net, spoilt(net, 1.01), BATCH, precision=name)
        for name in ("fp32", "fp16")
    )
    assert scaled.gradients[0].norm == pytest.approx(plain.gradients[0].norm, rel=1e-5)
    assert scaled.gradients[0].value == pytest.approx(plain.gradients[0].value, rel=1e-3)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_every_dropout_of_a_transformers_model_is_found(family: str) -> None:
    """Dropouts of modules, attention layers and configs are all detected."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
             "num_attention_heads": 2}  # fmt: skip
    if family == "bert":
        model = transformers.BertModel(
            transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.2)
        )
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, attention_dropout=0.2))
    found = {
        (type(owner).__name__, name)
        for owner, name, _ in owner_name_and_ratio_of_active_dropouts(model)
    }
    expected = {
        "bert": {("Dropout", "p"), ("BertConfig", "attention_probs_dropout_prob")},
        "llama": {("LlamaAttention", "attention_dropout"), ("LlamaConfig", "attention_dropout")},
    }
    assert expected[family] <= found
    before = owner_name_and_ratio_of_active_dropouts(model)
    with disable_dropout(model):
        assert owner_name_and_ratio_of_active_dropouts(model) == []
    assert owner_name_and_ratio_of_active_dropouts(model) == before

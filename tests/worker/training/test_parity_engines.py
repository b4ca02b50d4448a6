"""The comparison with real ORTModules: BERT, Llama and LoRA pass, planted errors are reported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import ParityError
from ortlaunch.worker.engine.comparison import (
    compare_passes_replaying_random_numbers_if_drawn,
    owner_name_and_ratio_of_active_dropouts,
    run_and_compare_passes,
)
from ortlaunch.worker.engine.differences import Comparison
from ortlaunch.worker.model.model import LossModule
from ortmodule._internal.base import custom_functions
from ortmodule._internal.base.counters import tally
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.base.test_custom_functions import Asked
from ortmodule_tests.modules import language_model, wrapped
from tests.makers import recipe
from tests.ort import needs_ort
from tests.training import run_here

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


def prepared(family: str, dropout: float, lora: bool = False) -> LossModule:
    """Return a small language model in training mode, with adapters or without."""
    model = language_model(family, "eager", dropout)
    if lora:
        import peft

        adapters = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
        model.model = peft.get_peft_model(model.model, adapters)
    return model.train()


def words() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 99, (3, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize(
    ("family", "dropout", "lora"),
    [
        pytest.param("bert", 0.0, False, marks=pytest.mark.slow),
        pytest.param("bert", 0.1, False, marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("llama", 0.0, False, marks=pytest.mark.slow),
        pytest.param("llama", 0.1, False, marks=pytest.mark.slow),
        ("llama", 0.1, True),
    ],
)
def test_language_models_pass(family: str, dropout: float, lora: bool) -> None:
    """Language models pass: loss and every gradient are within 1e-4."""
    model = prepared(family, dropout, lora)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    training = wrapped(model)
    training(**words()).backward()
    before = {name: model.get_parameter(name).grad.clone() for name in trained}

    # With dropout, a second ORTModule over the same weights is needed.
    found = run_and_compare_passes(model, wrapped(model) if dropout else training, words())

    assert len(found.gradients) == len(trained)
    assert found.largest_difference < 1e-4
    assert bool(owner_name_and_ratio_of_active_dropouts(model)) == bool(dropout)
    assert all(
        torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items()
    )
    # The training module would do, but it would discard its graph.
    if dropout:
        before_it = tally.re_exports
        assert run_and_compare_passes(model, training, words()).largest_difference < 1e-4
        assert tally.re_exports == before_it + 1


class Images(nn.Module):
    """Convolutions with a bias before BatchNorm, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            (nn.Conv2d(i, o, 3), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 16))
        ]
        self.body = nn.Sequential(*(each for layer in layers for each in layer))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bias_before_batch_norm_is_no_alarm(threads: int) -> None:
    """A gradient that is only rounding is no failure; buffers are compared, and restored."""
    net = Images()
    before = torch.get_num_threads()
    # Large inputs, so that rounding shows.
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 30 + 100
    torch.set_num_threads(threads)
    try:
        found = run_and_compare_passes(
            net, wrapped(net, threads=threads), {"x": x, "y": torch.arange(8)}, tolerance=3e-6
        )
    finally:
        torch.set_num_threads(before)
    assert {each.name for each in found.state} == {
        n for n, b in net.named_buffers() if b is not None
    }
    # Judged by the same pass in float64.
    assert "body.3.bias" in found.rounding
    assert found.largest_difference < 1e-5
    # The passes' updates of buffers were undone.
    assert not int(net.body[1].num_batches_tracked)


class Sampled(nn.Module):
    """A variational autoencoder, with a dropout that no module setting can switch off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        code = nn.functional.dropout(
            mean + spread.exp() * torch.randn_like(spread), 0.3, self.training
        )
        return (self.decoder(code + torch.empty(4).normal_()) - x).square().mean()


def test_a_reentrant_checkpoint_is_compared() -> None:
    """A reentrant checkpoint is compared, whose gradients exist only after backward()."""

    class Kept(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.utils.checkpoint.checkpoint(torch.nn.Sequential(self.first, nn.Tanh()), x * self.scale,
                                                       use_reentrant=True)  # fmt: skip
            return self.second(hidden).square().mean()

    # ONNX Runtime recomputes in its graph.
    net = Kept()
    net.scale = nn.Parameter(torch.ones(8))
    found = run_and_compare_passes(net, wrapped(net), {"x": X})
    assert found.largest_difference < 1e-5
    assert len(found.gradients) == 5
    assert all(each.reference_norm > 0 for each in found.gradients)


def test_a_model_that_draws_random_numbers_is_compared() -> None:
    """A model that draws random numbers is compared with the same ones, new in each step."""
    net = Sampled()
    made = []

    def replaying(model: nn.Module) -> Any:
        return made[0] if made else made.append(wrapped(model)) or made[0]

    module = wrapped(net)
    exports = tally.exports
    losses = set()
    for _ in range(2):
        found = compare_passes_replaying_random_numbers_if_drawn(net, module, {"x": X}, replaying)
        assert (found.draws, found.largest_difference < 1e-5) == (3, True)
        losses.add(found.loss)
        torch.rand(1)
    # One graph is exported for all steps; and one draws otherwise, because of the dropout.
    assert (len(losses), tally.exports) == (2, exports + 2)


def test_the_comparison_sees_the_weights_of_the_step() -> None:
    """The weights that are compared are those of the step, not those of the export."""
    model = prepared("bert", 0.1)
    engine = wrapped(model)
    first = run_and_compare_passes(model, engine, words())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    second = run_and_compare_passes(model, engine, words())
    # The loss follows the changed weights.
    assert second.loss != pytest.approx(first.loss, rel=1e-4)
    assert second.largest_difference < 1e-4


def test_compared_passes_are_not_the_runs(witness: PassAndGraphCounters) -> None:
    """Passes of a comparison are not counted as the run's, also if one raises."""
    model = prepared("llama", 0.0)
    engine = wrapped(model)
    engine(**words()).backward()
    with witness.exclude_passes_from_counts():
        run_and_compare_passes(model, engine, words())
    with pytest.raises(KeyError), witness.exclude_passes_from_counts():
        raise KeyError
    assert (witness.forward_passes, witness.backward_passes, witness.fallbacks) == (1, 1, 0)


class Net(nn.Module):
    """A tanh between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kept", [True, False])
def test_a_lost_gradient_of_a_function_is_seen(kept: bool) -> None:
    """Parity fails where the tensors that a function saves have lost `requires_grad`."""
    asked = Asked()
    without = mock.patch.object(torch.Tensor, "requires_grad_", lambda tensor, _: tensor)
    model = wrapped(asked)
    with contextlib.nullcontext() if kept else without:
        found = run_and_compare_passes(asked, model, {"x": X[:, :4]})
    assert (found.largest_difference < 1e-5) == kept
    assert (found.rounding, found.not_judged) == ([], "")


def asked_data() -> list[dict[str, torch.Tensor]]:
    return [{"x": row} for row in torch.randn(16, 4, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("kept", [True, False])
def test_parity_of_a_recipe_with_such_a_function(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ortlaunch parity` passes, and names the weight where the correction is taken out."""
    monkeypatch.setitem(sys.modules, "own_of_a_test", sys.modules[__name__])
    asked = recipe(
        model={"task": "custom", "factory": "own_of_a_test:Asked"},
        data={"train": {"format": "custom", "factory": "own_of_a_test:asked_data"}},
        engine={"name": "ort", "parity_steps": 2},
        train={"max_steps": 4},
    )
    if not kept:
        # The copy of a saved tensor no longer says that its tensor needs a gradient.
        monkeypatch.setattr(custom_functions, "_clone_tensor", torch.Tensor.clone)
    with (
        contextlib.nullcontext()
        if kept
        else pytest.raises(ParityError, match=r"second\.weight +1 ")
    ):
        run_here(tmp_path / "run", asked, "parity")


def compared(planted: Any) -> Comparison:
    """Compare Net on ORT, where the exporter writes `planted` for tanh."""
    torch.onnx.register_custom_op_symbolic("aten::tanh", planted, 9)
    try:
        net = Net()
        return run_and_compare_passes(net, wrapped(net), {"x": X})
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::tanh", 9)


def test_the_net_itself_passes() -> None:
    """Without a planted error there is no difference, so the tests below can fail."""
    assert compared(lambda g, x: g.op("Tanh", x)).largest_difference < 1e-5


def test_a_wrong_operator_is_seen() -> None:
    """A sigmoid in place of tanh changes the loss, and the gradients before and behind it."""
    found = compared(lambda g, x: g.op("Sigmoid", x))
    assert found.loss_difference > 0.01
    assert {d.name for d in found.gradients if d.value > 0.1} >= {
        "first.weight",
        "first.bias",
        "second.weight",
    }


@pytest.fixture
def wrong_gradient() -> Iterator[None]:
    """A wrong gradient of an ATen tanh on ORT, which has none: the identity."""
    from onnxruntime.training.ortmodule import _custom_gradient_registry

    identity = [("Identity", ["GO(0)"], ["GI(0)"])]
    _custom_gradient_registry.CustomGradientRegistry.register(
        "org.pytorch.aten", "ATen", ("tanh", ""), lambda: identity
    )
    _custom_gradient_registry.CustomGradientRegistry.register_all()
    yield
    del _custom_gradient_registry.CustomGradientRegistry._GRADIENTS[
        "org.pytorch.aten::ATen::tanh::"
    ]


@pytest.mark.usefixtures("wrong_gradient")
def test_a_wrong_gradient_behind_a_right_loss_is_seen() -> None:
    """A wrong gradient behind a right loss is found: the layers before tanh are named."""
    found = compared(
        lambda g, x: g.op("org.pytorch.aten::ATen", x, operator_s="tanh", overload_name_s="")
    )
    # The forward pass is right, and so is the last layer's gradient.
    assert found.loss_difference < 1e-6
    values = {d.name: d.value for d in found.gradients}
    assert set(list(values)[:2]) == {"first.weight", "first.bias"}
    assert min(values["first.weight"], values["first.bias"]) > 0.05
    assert max(values["second.weight"], values["second.bias"]) < 1e-5

"""Changes of a model between steps are followed on ONNX Runtime as in PyTorch, or refused."""

from __future__ import annotations

import copy
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule._internal.tracing.python_state import random_generator_state_text
from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
# State outside of the model, which its forward pass reads.
FACTOR: Any = 1.0
SETTINGS = types.SimpleNamespace(factor=1.0, unread=0)


class Defaults:
    """Settings as attributes of a class."""

    factor = 1.0


class Changing(nn.Module):
    """A model with every kind of state that a user may change between two steps."""

    # An attribute of the class.
    exponent = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.register_buffer("offset", torch.zeros(6))
        self.scale: Any = 1.0
        self.weights = [1.0, 2.0]
        # No forward pass reads this one.
        self.unread = 0
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0), steps=0)
        self.table: dict[str, Any] = {"scale": 1.0, "tensor": torch.ones(3)}
        self.array = numpy.ones(3, dtype="float32")
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * (2 if self.first.training else 1)
        loss = (
            self.second(self.norm(hidden) + self.offset) * self.scale
        ).square().mean() * self.weights[0]
        loss = loss * self.config.inner.scale * self.table["scale"] * self.table["tensor"].sum() / 9
        loss = (
            loss
            * torch.from_numpy(self.array).sum()
            * self.activation(x).to(self.dtype).square().sum().float()
            / 24
        )
        return loss * FACTOR * SETTINGS.factor * Defaults.factor * self.exponent


def frozen_norm(model: Changing) -> None:
    model.norm.eval()


def frozen_layer(model: Changing) -> None:
    model.first.eval()


def number(model: Changing) -> None:
    model.scale = 3.0


def tensor(model: Changing) -> None:
    model.scale = torch.tensor(3.0)


def in_a_list(model: Changing) -> None:
    model.weights[0] = 3.0


def momentum(model: Changing) -> None:
    # A number that torch reads, not the code of this model.
    model.norm.momentum = 0.5


def hook(model: Changing) -> None:
    model.first.register_forward_hook(lambda layer, inputs, output: output * 2)


def buffer(model: Changing) -> None:
    model.offset = torch.ones(6)


def weight(model: Changing) -> None:
    # Another object, not another value of the same weight.
    model.first.weight = nn.Parameter(torch.ones(6, 6))


def layer(model: Changing) -> None:
    model.second = nn.Linear(6, 3, bias=False)
    nn.init.ones_(model.second.weight)


def of_a_setting(model: Changing) -> None:
    model.config.inner.scale = 3.0


def in_a_dictionary(model: Changing) -> None:
    model.table["scale"] = 3.0


def tensor_in_a_dictionary(model: Changing) -> None:
    model.table["tensor"] = torch.full((3,), 3.0)


def in_an_array(model: Changing) -> None:
    model.array[0] = 3.0


def function(model: Changing) -> None:
    model.activation = torch.sin


def data_type(model: Changing) -> None:
    model.dtype = torch.float64


def of_the_class(model: Changing) -> None:
    # For both models at once.
    Changing.exponent = 3.0


def a_global(model: Changing) -> None:
    # As `global FACTOR` would, for this module.
    vars(sys.modules[__name__])["FACTOR"] = 3.0


def global_setting(model: Changing) -> None:
    SETTINGS.factor = 3.0


def class_setting(model: Changing) -> None:
    Defaults.factor = 3.0


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the state outside of a model that tests change."""
    for owner, name in (
        (Changing, "exponent"),
        (sys.modules[__name__], "FACTOR"),
        (SETTINGS, "factor"),
        (Defaults, "factor"),
    ):
        monkeypatch.setattr(owner, name, 1.0)


# Changes of the model's own attributes, of objects that it holds, and outside of it.
INSIDE = (
    frozen_norm,
    frozen_layer,
    number,
    tensor,
    in_a_list,
    momentum,
    hook,
    buffer,
    weight,
    layer,
)
HELD = (of_a_setting, in_a_dictionary, tensor_in_a_dictionary, in_an_array, function, data_type)
OUTSIDE = (of_the_class, a_global, global_setting, class_setting)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("change", [*INSIDE, *HELD, *OUTSIDE])
def test_a_changed_model_is_exported_again(change: Callable[[Changing], None]) -> None:
    """One export follows a change, and loss, gradients and buffers are eager's before and after it."""
    model = Changing()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    before = tally.re_exports
    for step in range(4):
        # After two steps, so that the first graph has been used again.
        if step == 2:
            change(model)
            change(eager)
        for given in (model, eager):
            given.zero_grad()
        ours = module(X)
        theirs = eager(X)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        # A bias before BatchNorm has no gradient except for rounding errors.
        same(model, eager, atol=1e-5)
    assert tally.re_exports - before == 1
    assert any(note.startswith("exported again, because ") for note in tally.notes)


@pytest.mark.usefixtures("restored")
def test_a_change_is_not_followed_where_the_setting_says_so() -> None:
    """Without `follow_model_state` the graph keeps the value of its export."""
    model = Changing()
    module = wrapped(model, follow_model_state=False)
    before = module(X)
    exports = tally.re_exports
    number(model)
    torch.testing.assert_close(module(X), before)
    assert tally.re_exports == exports


def test_what_no_forward_reads_may_change() -> None:
    """No export follows a change of a value that the forward pass does not read, or of the mode."""
    model = Changing()
    module = wrapped(model)
    before = tally.re_exports
    for step in range(2):
        model.unread = model.config.steps = SETTINGS.unread = step
        module.train()(X).backward()
        with torch.no_grad():
            module.eval()(X)
    assert tally.re_exports == before


class Remembering(nn.Linear):
    """A layer whose forward pass calls a function of the test, which may keep values."""

    def __init__(self, called: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(6, 6)
        self.called = called
        self.step = 0
        self.last = None
        # Attributes for the functions below.
        self.table = None
        self.rng = numpy.random.default_rng(0)
        self.old_rng = numpy.random.RandomState(0)
        self.counted = {"passes": 0}
        self.left = dict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self, super().forward(x)).square().mean()


def counts(model: Remembering, x: torch.Tensor) -> torch.Tensor:
    model.step += 1
    return x * model.step


def goes_on(model: Any, x: torch.Tensor) -> torch.Tensor:
    total = x if model.last is None else x + model.last
    model.last = total.detach()
    return total


# Only the first pass changes the attribute.
def keeps_a_table(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.table is None:
        model.table = torch.arange(6.0)
    return x * model.table


# Written before it is read, so no pass depends on an earlier one.
def tells(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = x.mean()
    return x * model.last


def counts_in_a_dictionary(model: Remembering, x: torch.Tensor) -> torch.Tensor:
    model.counted["passes"] += 1
    return x * model.counted["passes"]


# State of this module, which a function changes.
PASSES = [0]


def counts_outside(model: Remembering, x: torch.Tensor) -> torch.Tensor:
    PASSES[0] += 1
    return x * PASSES[0]


RNG = random.Random(0)


def draws(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(model.rng.random())


def draws_the_old_way(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(model.old_rng.rand())


def draws_one_of_a_pair(model: Any, x: torch.Tensor) -> torch.Tensor:
    # RandomState draws normal numbers in pairs and keeps the second one for the next call.
    return x * float(model.old_rng.randn())


def draws_outside(model: Remembering, x: torch.Tensor) -> torch.Tensor:
    return x * RNG.random()


@pytest.mark.parametrize(
    "called",
    [
        counts,
        goes_on,
        counts_in_a_dictionary,
        counts_outside,
        draws,
        draws_the_old_way,
        draws_one_of_a_pair,
        draws_outside,
    ],
)
def test_a_pass_that_goes_on_from_the_last_is_refused(called: Any) -> None:
    """A forward pass that continues from a value of the pass before is refused."""
    with pytest.raises(
        Exception,
        match=r"reads and changes (the model's "
        r"(step|last|counted|(old_)?rng)|.*_model_state\.(PASSES|RNG))( at \S+:\d+)?,",
    ):
        wrapped(Remembering(called))(X)


class WeightDrop(nn.Module):
    """A recurrent layer whose weight is drawn from another one in each pass (AWD-LSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, batch_first=True)
        self.raw = nn.Parameter(self.inner._parameters.pop("weight_hh_l0").data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.weight_hh_l0 = nn.functional.dropout(self.raw, 0.5, self.training)
        return self.inner(x)[0].sum()


def test_the_layer_that_changes_a_value_may_run_as_torch() -> None:
    """The message names the line and the setting, which works."""
    x = torch.ones(2, 3, 4)
    with pytest.raises(Exception, match=r"at \S+:\d+, .*torch_modules=\['0'\]") as found:
        wrapped(nn.Sequential(WeightDrop()))(x)
    # Without ORT's traceback around it.
    assert "\n" not in str(found.value).strip()
    wrapped(nn.Sequential(WeightDrop()), torch_modules=["0"])(x).backward()


def tells_in_a_dictionary(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.left["mean"] = x.mean()
    return x * model.left["mean"]


@pytest.mark.parametrize("called", [keeps_a_table, tells, tells_in_a_dictionary])
def test_what_a_pass_makes_for_itself_is_not(called: Any) -> None:
    """A table that is made once, and a value that a pass writes before it reads it, are accepted."""
    model = Remembering(called)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for each in (module, eager):
        each(X).backward()
    same(model, eager)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_numbers_that_torch_does_not_draw_are_refused(draw: Callable[[], float]) -> None:
    """A forward pass that draws numbers with Python or NumPy is refused."""
    with pytest.raises(Exception, match="draws numbers with Python's"):
        # The export's number would be that of every step.
        wrapped(Remembering(lambda model, x: x * draw()))(X)


def test_a_seed_inside_the_model_is_refused() -> None:
    """A forward pass that seeds torch is refused: its graph would draw on."""
    with pytest.raises(Exception, match="seeds torch's random numbers with 5"):
        wrapped(Remembering(lambda model, x: x * torch.manual_seed(5).initial_seed()))(X)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "foreign"])
def test_a_drawn_number_changes_the_state_of_a_generator(kind: str) -> None:
    """The text is the same until a number is drawn, for each of NumPy's generators."""

    class Foreign(numpy.random.PCG64):
        """A generator of another package, with NumPy's own numbers in its state."""

        @property
        def state(self) -> dict[str, Any]:
            inner = super().state["state"]["state"]
            return {"low": numpy.uint64(inner % 2**64), "high": numpy.uint64(inner >> 64)}

    made = Foreign if kind == "foreign" else getattr(numpy.random, kind)
    generator = numpy.random.Generator(made(1))
    before = random_generator_state_text(generator)
    assert random_generator_state_text(generator) == before
    generator.random()
    assert random_generator_state_text(generator) != before


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("path", ["", "second"])
def test_hooks_of_a_backward_pass_are_refused(kind: str, path: str) -> None:
    """Hooks of a backward pass are refused in training, where the graph would never call them."""
    model = Changing()
    # The path "" is the model itself.
    getattr(model.get_submodule(path), kind)(lambda *given: None)
    module = wrapped(model)
    with pytest.raises(Exception, match=rf"{path or 'the model'} has a backward hook"):
        module(X)
    with torch.no_grad():
        module.eval()(X)


class Configured(nn.Module):
    """A model that reads an environment variable in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean() * float(os.environ.get("ORTLAUNCH_TEST_SCALE", "1"))


def test_a_changed_environment_variable_is_exported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable may be set, changed and removed between passes."""
    model = Configured()
    module = wrapped(model)
    # None: the variable is not set.
    for scale in (None, "2", "3", None):
        if scale is None:
            monkeypatch.delenv("ORTLAUNCH_TEST_SCALE", raising=False)
        else:
            monkeypatch.setenv("ORTLAUNCH_TEST_SCALE", scale)
        torch.testing.assert_close(module(X), model(X))
    assert (
        "exported again, because environment variable ORTLAUNCH_TEST_SCALE had changed"
        in tally.notes
    )

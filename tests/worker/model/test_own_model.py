"""The user's own models: all forms of a returned loss, and the recipe's factory."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.engine.engine import build_engine
from ortlaunch.worker.model.model import (
    LossModule,
    _refuse_sparse_gradients,
    require_forward_takes_batch,
    seed_and_build_loss_module_on_cpu,
)
from ortlaunch.worker.process_group.distributed import DistributedContext
from tests.makers import plan, recipe
from tests.ort import needs_ort


class Net(nn.Module):
    """A model that returns its loss in the form given to its constructor."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.weight * x)


FORMS = {
    "tensor": lambda loss: loss,
    "tuple": lambda loss: (loss, torch.ones(3)),
    "list": lambda loss: [loss],
    "mapping": lambda loss: {"logits": torch.ones(3), "loss": loss},
    "object": lambda loss: types.SimpleNamespace(loss=loss, logits=torch.ones(3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_in_any_form(form: str) -> None:
    """A loss is accepted alone, first in a tuple, or by name in a mapping or an object."""
    loss = LossModule(Net(FORMS[form]))(x=torch.tensor(3.0))
    assert float(loss.detach()) == 6.0
    loss.backward()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda loss: loss.expand(4, 2), r"got a tensor of shape \(4, 2\) in Tensor"),
        (lambda loss: loss.reshape(1), r"got a tensor of shape \(1,\) in Tensor"),
        (lambda loss: {"losss": loss}, "got NoneType in dict with losss; name it loss"),
        (lambda loss: (torch.ones(2), loss), r"got a tensor of shape \(2,\) in tuple"),
        (lambda loss: types.SimpleNamespace(loss=None), "got NoneType in SimpleNamespace"),
        (lambda loss: None, "got NoneType in NoneType"),
        (lambda loss: (), r"got tuple in tuple"),
        (lambda loss: float(loss.detach()), "got float in float"),
    ],
)
def test_no_loss(form: Any, message: str) -> None:
    """A forward without a scalar loss is an error that names the required result."""
    with pytest.raises(
        InputError, match=rf"the model's forward must return its loss, a scalar; {message}"
    ):
        LossModule(Net(form))(x=torch.tensor(3.0))


OWN = """
import torch


def model(size, kind=torch.nn.Linear):
    return (kind if size == 9 else kind(size, 1)) if size else None


compiled = []


def backend(graph, inputs):
    compiled.append(len(inputs))
    return graph.forward


class Twice(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.first = self.second = torch.compile(torch.nn.Linear(size, size), backend=backend)
        self.last = torch.nn.Sequential(torch.compile(torch.nn.Linear(size, 1), backend=backend))

    def forward(self, x):
        return self.last(self.second(self.first(x))).mean()


def twice(size, whole):
    net = Twice(size)
    return torch.compile(net, backend=backend) if whole else net


def data():
    return [{"x": 1}]
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Remove the module after the test, so that the next test imports its own."""
    yield
    sys.modules.pop("own_net", None)


def own(
    arguments: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, factory: str = "model"
) -> LossModule:
    """Write the module `own_net` into this folder, and build its model."""
    (folder / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    chosen = recipe(
        model={"task": "custom", "factory": f"own_net:{factory}", "arguments": arguments},
        data={"train": {"format": "custom", "factory": "own_net:data"}},
    )
    return seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_keeps_its_names(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of layers of torch.compile have the names that they have without it."""
    arguments = {"size": 4, "whole": whole}
    model = own(arguments, tmp_path, monkeypatch, "twice").model
    # As in the same model without torch.compile: a layer with two names has both in a state.
    assert list(model.state_dict()) == [
        f"{layer}.{name}" for layer in ("first", "second", "last.0") for name in ("weight", "bias")
    ]
    x = torch.randn(2, 4)
    # Dynamo warns of gradients that it looks at itself.
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.last[0](model.first(model.first(x))).mean())
    # They still run compiled.
    assert sys.modules["own_net"].compiled


def test_an_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's factory is called with the recipe's arguments, after the seed is set."""
    first, second = (own({"size": 5}, tmp_path, monkeypatch) for _ in range(2))
    assert [tuple(p.shape) for p in first.parameters()] == [(1, 5), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "model.factory returned NoneType; it must return a torch.nn.Module"),
        ({"size": 9}, "model.factory returned the class Linear, not an object of it; it must"),
        ({"sise": 3}, "model.factory: own_net:model.* and its `arguments` differ"),
    ],
)
def test_an_own_model_that_is_none(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that returns no module or takes other arguments is an error."""
    with pytest.raises(InputError, match=message):
        own(arguments, tmp_path, monkeypatch)


class Taking(nn.Module):
    """A model with arguments of its own names."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 1), fails
        self.table: dict[str, float] = {}

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x).square().mean() * (self.table["lookup"] if self.fails else 1.0)


def test_arguments_that_no_batch_has() -> None:
    """The names of forward and of a batch stand side by side, before a pass."""
    x, y = torch.ones(2, 4), torch.ones(2)
    require_forward_takes_batch(Taking(), {"x": x, "target": y})
    require_forward_takes_batch(Taking(), {"x": x})
    told = (
        "model.factory: Taking.forward takes x, target; a batch of data.train has x, y: got an "
        "unexpected keyword argument 'y'; give both the same names"
    )
    with pytest.raises(InputError, match=re.escape(told)):
        require_forward_takes_batch(Taking(), {"x": x, "y": y})
    # A hook may rename them.
    renamed = Taking()
    renamed.register_forward_pre_hook(
        lambda module, given, named: (given, {"x": named["x"]}), with_kwargs=True
    )
    require_forward_takes_batch(renamed, {"x": x, "y": y})


@needs_ort
def test_the_users_own_mistake_is_no_fault_of_onnx_runtime() -> None:
    """A model that raises in plain PyTorch, too, raises its own error on engine ort."""
    chosen = recipe(engine={"name": "ort"})
    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    model = LossModule(Taking(fails=True))
    with pytest.raises(KeyError, match="lookup"):
        build_engine(chosen, plan(chosen), model, alone, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({}, False),
        ({"optimizer": {"name": "adamw", "learning_rate": 0.1}}, True),
        ({"optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}}, True),
        ({"optimizer": {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.9}}, True),
        ({"train": {"max_steps": 1, "max_grad_norm": 1.0}}, True),
        ({"zero": {"stage": 1}}, True),
    ],
)
def test_sparse_gradients(sections: dict[str, Any], refused: bool) -> None:
    """A layer with sparse gradients is named where the optimizer or clipping cannot take them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True))
    with (
        pytest.raises(InputError, match="model: 1 has sparse gradients")
        if refused
        else nullcontext()
    ):
        _refuse_sparse_gradients(recipe(**sections), model)

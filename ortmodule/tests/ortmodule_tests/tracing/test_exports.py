"""Every model runs its own graph, and an export copies no large weights."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, Settings
from ortmodule._internal import import_ortmodule
from ortmodule._internal.base.counters import tally
from ortmodule._internal.tracing import export_wrappers
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

X = torch.linspace(-1, 2, 24).reshape(6, 4)
Function = Callable[[torch.Tensor], torch.Tensor]
Choose = Callable[[pytest.MonkeyPatch, bool], nn.Module]

# Globals of this module, which tests replace between two models.
FUNCTION: Function = torch.relu
PARTIAL: Function = functools.partial(torch.clamp, min=0.0)
SETTINGS = types.SimpleNamespace(scale=1.0)


class Layer(nn.Module):
    """One layer, and functions of its output."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = FUNCTION(self.layer(x)) + PARTIAL(self.layer(x))
        return made.sum() * self.scale * SETTINGS.scale


def enclosing(function: Function, factor: float) -> nn.Module:
    """Return a model of a class that reads the arguments of the enclosing function."""

    class Local(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.layer(x)).sum() * factor

    return Local()


def with_attribute(factor: float) -> nn.Module:
    """Return a model of a class with an attribute from the arguments of the enclosing function."""

    class Local(Layer):
        scale = factor

    return Local()


def with_global(name: str, first: object, other: object) -> Choose:
    def choose(patch: pytest.MonkeyPatch, second: bool) -> nn.Module:
        patch.setattr(sys.modules[__name__], name, other if second else first)
        return Layer()

    return choose


def with_class(name: str, first: object, other: object) -> Choose:
    def choose(patch: pytest.MonkeyPatch, second: bool) -> nn.Module:
        patch.setattr(Layer, name, other if second else first)
        return Layer()

    return choose


def summed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.layer(x).sum()


def squared(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.layer(x).square().sum()


# By case: a function that makes the first or the second of two models.
FORMS: dict[str, Choose] = {
    "a global function": with_global("FUNCTION", torch.relu, torch.tanh),
    "a closure over a function": lambda _, second: enclosing(
        torch.tanh if second else torch.relu, 1.0
    ),
    "a closure over a number": lambda _, second: enclosing(torch.relu, 3.0 if second else 1.0),
    "a class attribute set later": with_class("scale", 1.0, 3.0),
    "a class attribute of a factory": lambda _, second: with_attribute(3.0 if second else 1.0),
    "a forward given to the class": with_class("forward", summed, squared),
    "a global partial": with_global(
        "PARTIAL", *(functools.partial(torch.clamp, min=least) for least in (0.0, 0.5))
    ),
    "a global settings object": with_global(
        "SETTINGS", *(types.SimpleNamespace(scale=n) for n in (1.0, 3.0))
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    # Before the change, because the built extensions are in the real cache.
    import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_a_second_model_trains_as_itself(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that differ only in the Python values around their code each equal eager."""
    losses = []
    for second in (False, True):
        torch.manual_seed(0)
        ours = FORMS[form](monkeypatch, second)
        eager = copy.deepcopy(ours)
        expected = eager(X)
        loss = ORTModule(ours, Settings(threads=1))(X)
        expected.backward()
        loss.backward()
        losses.append(expected.item())
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(ours.layer.weight.grad, eager.layer.weight.grad)
    # The two models really compute different values.
    assert losses[0] != losses[1]


def test_orts_own_cache_is_never_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORTMODULE_CACHE_DIR has no effect, and a note reports it."""
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder / "ort"))
    module = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), Settings(threads=1))
    module(X)
    module.eval()
    with torch.no_grad():
        # With ORT's cache an evaluation would run the training graph, whose dropout makes passes
        # differ.
        assert module(X).equal(module(X))
    assert not (folder / "ort").exists()
    assert any("ORTMODULE_CACHE_DIR" in note for note in tally.notes)


class Shapes(nn.Module):
    """Layers of every kind whose shapes an export infers, and a buffer with a view's sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.convolution = nn.Conv1d(64, 32, 3, padding=1)
        self.recurrent = nn.LSTM(32, 32, batch_first=True)
        self.last = nn.Linear(32, 40)
        self.register_buffer("sizes", torch.tensor([-1, 20]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(self.words(ids).transpose(1, 2)).transpose(1, 2)
        return self.last(self.recurrent(hidden)[0]).reshape(tuple(self.sizes)).softmax(-1)


# torch.onnx.export warns of its deprecation and of all that a trace may leave out.
@pytest.mark.filterwarnings("ignore")
def test_an_export_without_weights_is_the_same(built: None) -> None:
    """Shape inference without large weights gives the same graph, byte by byte."""
    import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    model = Shapes()
    ids = torch.arange(12).reshape(2, 6)
    found = []
    settings = {
        "dynamo": False,
        "export_params": False,
        "opset_version": 17,
        "do_constant_folding": False,
    }
    for export in (
        torch.onnx.export,
        export_wrappers.wrap_export_hiding_large_weights_from_inference(torch.onnx.export),
    ):
        file = io.BytesIO()
        export(model, (ids,), file, input_names=["ids"], dynamic_axes={"ids": {0: "n"}}, **settings)
        found.append(file.getvalue())
    assert found[0] == found[1]


def test_other_exports_of_the_process_keep_the_exporters_forms() -> None:
    """An ONNX file of an Embedding and norms runs everywhere after an ORTModule has trained."""
    ORTModule(Layer())(X).backward()
    version = int(importlib.import_module("onnxruntime.training.ortmodule").ONNX_OPSET_VERSION)
    model = nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.GroupNorm(2, 6))
    file = io.BytesIO()
    with warnings.catch_warnings():
        # torch's notice that TorchScript's exporter is old.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.arange(6)[None],), file, opset_version=version, dynamo=False
        )  # fmt: skip
    nodes = onnx.load_model_from_string(file.getvalue()).graph.node
    assert {node.domain for node in nodes} == {""}

"""What ORTModule 1.19.2 does wrong, made right: every repair, and that its test fails where the repair is left out."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ortlaunch import extensions
from ortlaunch.errors import EngineError
from ortlaunch.recipe.engine import Engine
from ortlaunch.worker import engine
from ortlaunch.worker.ort import known, patching, repairs
from ortlaunch.worker.ort.repairs import REPAIRS, apply_repairs
from ortlaunch.worker.ort.tally import tally
from ortlaunch.worker.ort.wrap import wrap

INSTALLED = bool(extensions.versions(extensions.EXTRA_OF))
pytestmark = pytest.mark.skipif(not INSTALLED, reason='needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"')


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same weights in every run."""
    torch.manual_seed(0)


def wrapped(module: nn.Module, **settings: Any) -> Any:
    """An ORTModule; exported anew, so that what is tested is not an earlier run's."""
    return wrap(module, Engine(**{"export_cache": False, **settings}), threads=1)


def same(ours: nn.Module, eager: nn.Module, atol: float = 1e-6) -> None:
    """Gradients and buffers are eager's."""
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=atol, msg=name)
    others = dict(eager.named_buffers())
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, others[name], rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------------------------------------- changed calls


class Flexible(nn.Module):
    """A forward that takes arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, *more: Any, bias: Any = None, scale: Any = 1, flags: Any = (), **rest: Any
    ) -> Any:
        y = self.linear(x.to(self.linear.weight.dtype) if x.dim() == 2 else x.mean(1))
        if bias is not None:
            y = y + bias
        if scale > 2:
            y = y.square()
        for flag in flags:
            y = torch.tanh(y) if flag else y * 2
        for value in (*more, *rest.values()):
            y = y * value
        return y.square().sum() * scale


X, Y = torch.randn(2, 4), torch.randn(5, 4)
FIRST: tuple[tuple[Any, ...], dict[str, Any]] = ((X,), {"bias": torch.ones(3), "scale": 2, "flags": [True]})
CHANGES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a keyword argument more": ((X,), {**FIRST[1], "other": torch.tensor(3.0)}),
    "a positional argument more": ((X, torch.tensor(3.0)), FIRST[1]),
    "an argument less": ((X,), {"scale": 2, "flags": [True]}),
    "a tensor becomes None": ((X,), {**FIRST[1], "bias": None}),
    "another type of number": ((X.long(),), FIRST[1]),
    "another rank": ((X[:, None].repeat(1, 3, 1),), FIRST[1]),
    "a gradient is wanted": ((X.clone().requires_grad_(),), FIRST[1]),
    "another number": ((X,), {**FIRST[1], "scale": 3}),
    "another kind of number": ((X,), {**FIRST[1], "scale": 2.5}),
    "another truth in a list": ((X,), {**FIRST[1], "flags": [False]}),
    "a longer list": ((X,), {**FIRST[1], "flags": [True, False]}),
}


def losses(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Training and evaluation loss; gradients gather."""
    loss = model(*args, **kwargs)
    loss.backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(*args, **kwargs)
    model.train()
    return [loss.item(), evaluated.item()]


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_call_is_exported_again(change: str) -> None:
    """Whatever changes in the call, and when it changes back, both modes give eager's loss and gradients."""
    model = Flexible()
    eager, module = copy.deepcopy(model), wrapped(model)
    before = tally.re_exports
    for args, kwargs in (FIRST, CHANGES[change], CHANGES[change], FIRST):
        for given in (model, eager):
            given.zero_grad()
        assert losses(module, args, kwargs) == pytest.approx(losses(eager, args, kwargs), rel=1e-5)
        same(model, eager)
    assert tally.re_exports - before == 4


def test_another_shape_is_the_same_call() -> None:
    """Batches of other sizes run in the graph of the first."""
    model = Flexible()
    eager, module = copy.deepcopy(model), wrapped(model)
    losses(module, *FIRST)
    exports = tally.exports, tally.re_exports
    assert losses(module, (Y,), FIRST[1]) == pytest.approx(losses(eager, (Y,), FIRST[1]), rel=1e-5)
    assert (tally.exports, tally.re_exports) == exports


def test_autocast_is_part_of_a_call() -> None:
    """A pass without autocast after one with it is in full precision again."""
    model = wrapped(Flexible())
    with torch.autocast("cpu", torch.float16, enabled=False):
        model(X)
    call = model._torch_module._execution_manager(True)._ortlaunch_call
    with torch.autocast("cpu", torch.bfloat16):
        assert repairs._autocast(model._torch_module._execution_manager(True)) != call[2]


def test_backward_after_another_forward() -> None:
    """Two calls of different form before one backward pass: each runs backward in its own graph."""
    model = Flexible()
    eager, module = copy.deepcopy(model), wrapped(model)
    for given, run in ((model, module), (eager, eager)):
        given.zero_grad()
        (run(X) + run(Y, bias=torch.ones(3)) + run(X, scale=3)).backward()
    same(model, eager)


# ---------------------------------------------------------------------------------------------- frozen weights


class Two(nn.Module):
    """Two layers with a scalar output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_frozen_weights_have_no_gradient_in_the_graph() -> None:
    """Only what is trained is an output of the graph; unfrozen weights get their gradient."""
    model = Two()
    model.first.requires_grad_(False)
    eager, module = copy.deepcopy(model), wrapped(model)
    for trained in (2, 4):
        losses(module, (X,), {})
        losses(eager, (X,), {})
        graph = module._torch_module._execution_manager(True)._onnx_models.optimized_model.graph
        assert len([output for output in graph.output if output.name.endswith("_grad")]) == trained
        for given in (model, eager):
            given.first.requires_grad_(True)
    same(model, eager)


# ---------------------------------------------------------------------------------------------------- buffers


class Normalized(nn.Module):
    """A small network with batch normalization after a convolution and after a linear layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.convolution, self.first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **settings)
        self.linear, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3)

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
    eager, module = copy.deepcopy(model), wrapped(model)
    for x in images(5):
        module(x).backward()
        eager(x).backward()
    same(model, eager, atol=1e-4)
    assert [int(n.num_batches_tracked) for n in (model.first, model.second)] == [0 if frozen else 5, 5]
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
        (lambda: Normalized(momentum=None), images(1)[0], "first is a BatchNorm with momentum=None"),
        (Twice, X, "norm is a BatchNorm that runs more than once"),
        (Counter, X, "changes the model's steps"),
        (lambda: Counter().eval(), X, "changes the model's steps"),
    ],
    ids=["momentum", "twice", "counter", "counter in evaluation"],
)
def test_statistics_that_cannot_be_exact_are_refused(make: Callable[[], nn.Module], x: Any, message: str) -> None:
    """The reason names the layer or the buffer, and the buffers are as they were."""
    model = make()
    before = {name: value.clone() for name, value in model.named_buffers()}
    with pytest.raises(EngineError, match=message):
        wrapped(model)(x)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


# ------------------------------------------------------------------------------------------ gradient checkpointing


class Checkpointed(Two):
    """Gradient checkpointing of the first layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(lambda y: torch.relu(self.first(y)), x, use_reentrant=self.reentrant)
        return self.second(hidden).square().mean()


def level(module: Any) -> int:
    return int(module._torch_module._execution_manager(True)._runtime_options.memory_optimization_level)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("asked", [0, 2])
def test_checkpointing_becomes_recomputation(reentrant: bool, asked: int) -> None:
    """Without a level in the recipe it is 1, with one that one; gradients are eager's, and a note says so."""
    model = Checkpointed(reentrant)
    eager, module = copy.deepcopy(model), wrapped(model, memory_optimization=asked)
    tally.notes.clear()
    x = X.clone().requires_grad_()
    for _ in range(2):
        losses(module, (x,), {})
        losses(eager, (x,), {})
    same(model, eager)
    assert level(module) == (asked or 1)
    assert any("memory_optimization: 1" in note for note in engine._ort_notes()) == (asked == 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_checkpointing_becomes_recomputation(reentrant: bool) -> None:
    """A Llama with gradient_checkpointing_enable trains as it does in eager PyTorch."""
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ids = torch.arange(24).reshape(2, 12)
    eager, module = copy.deepcopy(model), wrapped(model)
    ours, theirs = (
        given(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)[0] for given in (module, eager.train())
    )
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    same(model, eager)
    assert level(module) == 1


def test_recomputation_in_a_second_graph() -> None:
    """A changed call makes another graph, which recomputes its own layers."""

    class Called(Checkpointed):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    model = Called(reentrant=False)
    eager, module = copy.deepcopy(model), wrapped(model)
    for scale in (1.0, 2.0, 1.0):
        module(X, scale).backward()
        eager(X, scale).backward()
    same(model, eager)
    assert level(module) == 1


def test_no_checkpointing_no_recomputation() -> None:
    """A model without it keeps its activations."""
    module = wrapped(Two())
    module(X).backward()
    assert level(module) == 0


# ------------------------------------------------------------------------------------------------ the model's own


def test_a_wrapped_model_answers_as_the_model() -> None:
    """Names of weights, buffers and layers, and attributes, are the model's; loading its state reaches it."""
    model = Normalized()
    model.config = {"a": 1}  # type: ignore[assignment]
    module = wrapped(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(module, names)()] == [name for name, _ in getattr(model, names)()]
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.config is model.config
    module.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_frozen_layers_stay_in_their_mode() -> None:
    """Wrapping and exporting leave every layer in training or evaluation as it was."""
    model = Normalized()
    model.first.eval()
    module = wrapped(model)
    module(images(1)[0]).backward()
    assert [layer.training for layer in (model, model.first, model.second)] == [True, False, True]


# ------------------------------------------------------------------------------------------- each repair is needed

# The test of each repair that must fail in a process without it.
WITHOUT = {
    "skip_frozen_gradients": "test_frozen_weights_have_no_gradient_in_the_graph",
    "export_for_changed_calls": "test_a_changed_call_is_exported_again[another number]",
    "keep_graphs_for_backward": "test_backward_after_another_forward",
    "keep_buffers_exact": "test_batch_normalization_is_eagers[trained]",
    "map_gradient_checkpointing": "test_checkpointing_becomes_recomputation[0-False]",
    "cache_exports": "test_the_same_model_is_exported_once",
}
RUN = """
import sys, pytest
from ortlaunch.worker.ort.compat import import_ortmodule
from ortlaunch.worker.ort.repairs import apply_repairs
import_ortmodule()
apply_repairs(sys.argv[1])
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def run_without(repair: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that runs the repair's test without the repair."""
    file = Path(__file__).with_name("test_ort_export_cache.py" if repair == "cache_exports" else "test_ort_repairs.py")
    command = [sys.executable, "-c", RUN, repair, f"{file}::{WITHOUT[repair]}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("repair", list(WITHOUT))
def test_each_repair_is_needed(repair: str) -> None:
    """Without it, its test fails, or ONNX Runtime crashes in it."""
    done = run_without(repair)
    assert done.returncode in (1, -signal.SIGSEGV), done.stdout + done.stderr
    assert done.returncode < 0 or "1 failed" in done.stdout


def test_every_repair_is_tested_and_applied() -> None:
    """A repair that is added gets its line above; on the known ORT all are in force."""
    wrapped(Two())
    assert {repair.name for repair in REPAIRS} == WITHOUT.keys()
    assert WITHOUT.keys() <= set(patching.applied())
    assert not WITHOUT.keys() & patching.not_applied().keys()


def test_an_unknown_source_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair of a function with another source, or of another version, is not made; its reason is kept."""
    monkeypatch.setattr(patching, "_applied", [])
    monkeypatch.setattr(patching, "_not_applied", {})
    changed = f"{known.TRANSITION}._export_model"
    monkeypatch.setitem(known.KNOWN, changed, "0" * 16)
    monkeypatch.setattr(repairs, "REPAIRS", [repair for repair in REPAIRS if changed in repair.functions])
    apply_repairs()
    assert patching.applied() == ()
    assert "skip_frozen_gradients" in patching.not_applied()
    assert set(patching.not_applied().values()) == {f"the source of {changed} is not that of 1.19.2"}
    monkeypatch.setattr(patching, "_not_applied", {})
    monkeypatch.setattr("onnxruntime.__version__", "1.20.0")
    apply_repairs()
    assert "1.20.0 is installed" in patching.not_applied()["keep_buffers_exact"]

"""Each repair of ORTModule 1.19.2 works, and its test fails if the repair is left out.

Tests of buffers are in test_buffers.py, those of exports in test_exports.py.
"""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ortmodule._internal import graph_cache, pipeline
from ortmodule._internal.base import counters, repair_registry
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.repair_registry import REPAIR_BY_NAME
from ortmodule._internal.module import import_ortmodule_with_all_repairs
from ortmodule_tests.forks import Run
from ortmodule_tests.modules import (
    Checkpointed,
    Layers,
    language_model,
    manager_of,
    same,
    training_graph,
    wrapped,
)
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
ROOT = Path(pipeline.__file__).parent


# ------------------------------------------------------------------------------------ changed calls


class Flexible(nn.Module):
    """A model whose forward accepts arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self,
        x: torch.Tensor,
        *more: Any,
        bias: Any = None,
        scale: Any = 1,
        flags: Any = (),
        **rest: Any,
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


X = torch.randn(2, 4)
Y = torch.randn(5, 4)
# The first call of each test, from which the changed calls differ.
FIRST: tuple[tuple[Any, ...], dict[str, Any]] = (
    (X,),
    {"bias": torch.ones(3), "scale": 2, "flags": [True]},
)
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
    """Return the losses of training and of evaluation; gradients accumulate."""
    loss = model(*args, **kwargs)
    loss.backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(*args, **kwargs)
    model.train()
    return [loss.item(), evaluated.item()]


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_call_is_exported_again(change: str) -> None:
    """After a change of the call, and its reversal, both modes give eager's loss and gradients."""
    model = Flexible()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    before = tally.re_exports
    for args, kwargs in (FIRST, CHANGES[change], CHANGES[change], FIRST):
        for given in (model, eager):
            given.zero_grad()
        assert losses(module, args, kwargs) == pytest.approx(losses(eager, args, kwargs), rel=1e-5)
        same(model, eager)
    # A change exports a training and an evaluation graph; its reversal uses the first graphs again.
    # An evaluation graph does not depend on `requires_grad`.
    assert tally.re_exports - before == (1 if change == "a gradient is wanted" else 2)


@pytest.mark.usefixtures("witness")
def test_who_watches_is_told_of_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor is notified of the trace, the gradient graph and the session of each export.

    Each of them may take longer than any step.
    """
    model = wrapped(Flexible())
    told = []

    @contextlib.contextmanager
    def building() -> Iterator[None]:
        told.append(tally.exports)
        yield

    monkeypatch.setattr(counters, "while_building", building)
    for args, kwargs in (FIRST, FIRST, next(iter(CHANGES.values()))):
        model(*args, **kwargs).backward()
    first = tally.exports - 1
    # The first call and the changed one notify three times each; `exports` grows after the trace.
    assert told == [first - 1, first, first, first, first + 1, first + 1]


def test_another_shape_is_the_same_call() -> None:
    """Batches of other sizes run in the first graph."""
    model = Flexible()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    losses(module, *FIRST)
    exports = tally.exports, tally.re_exports
    assert losses(module, (Y,), FIRST[1]) == pytest.approx(losses(eager, (Y,), FIRST[1]), rel=1e-5)
    assert (tally.exports, tally.re_exports) == exports


def test_autocast_is_part_of_a_call() -> None:
    """A graph exported without autocast is not used with it."""
    model = wrapped(Flexible())
    # A disabled context is no autocast.
    with torch.autocast("cpu", torch.float16, enabled=False):
        model(X)
    graphs = graph_cache.TorchModuleRecord.attached_to(model._torch_module).graphs
    manager, key = graphs.cached_graphs[0]
    call = graph_cache._collect_pass_properties(manager, (X,), {})
    assert key.difference_from_pass_or_empty(manager, call) == ""
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            key.difference_from_pass_or_empty(
                manager, graph_cache._collect_pass_properties(manager, (X,), {})
            )
            == "the call"
        )


def test_backward_after_another_forward() -> None:
    """Each of several calls before one backward pass runs backward in its own graph."""
    model = Flexible()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for given, run in ((model, module), (eager, eager)):
        given.zero_grad()
        (run(X) + run(Y, bias=torch.ones(3)) + run(X, scale=3)).backward()
    same(model, eager)


# ----------------------------------------------------------------------------------- frozen weights


def test_frozen_weights_have_no_gradient_in_the_graph() -> None:
    """Only trained weights have a gradient in the graph; weights get one when they are unfrozen."""
    model = Layers(4)
    model.first.requires_grad_(False)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for trained in (2, 4):
        losses(module, (X,), {})
        losses(eager, (X,), {})
        graph = training_graph(module)
        assert len([output for output in graph.output if output.name.endswith("_grad")]) == trained
        for given in (model, eager):
            given.first.requires_grad_(True)
    same(model, eager)


# --------------------------------------------------------------------------- gradient checkpointing


def level(module: Any) -> int:
    return int(manager_of(module)._runtime_options.memory_optimization_level)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("asked", [0, 2])
def test_checkpointing_becomes_recomputation(reentrant: bool, asked: int) -> None:
    """Recomputation has the recipe's level, or 1 and a note; gradients equal eager's."""
    model = Checkpointed(reentrant, 4)
    eager = copy.deepcopy(model)
    module = wrapped(model, memory_optimization=asked)
    # Notes of earlier tests in this process.
    tally.notes.clear()
    x = X.clone().requires_grad_()
    for _ in range(2):
        losses(module, (x,), {})
        losses(eager, (x,), {})
    same(model, eager)
    assert level(module) == (asked or 1)
    assert any("memory_optimization: 1" in note for note in tally.notes) == (asked == 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_checkpointing_becomes_recomputation(reentrant: bool) -> None:
    """A Llama with activation_checkpointing_enable trains as in eager PyTorch."""
    model = language_model("llama", "sdpa")
    model.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    # A reentrant checkpoint needs an input with a gradient.
    model.model.enable_input_require_grads()
    ids = torch.arange(24).reshape(2, 12)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    ours, theirs = (
        given(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        for given in (module, eager.train())
    )
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    same(model, eager)
    assert level(module) == 1


def test_recomputation_in_a_second_graph() -> None:
    """A changed call makes another graph with its own recomputation."""

    class Called(Checkpointed):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    model = Called(reentrant=False, width=4)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for scale in (1.0, 2.0, 1.0):
        module(X, scale).backward()
        eager(X, scale).backward()
    same(model, eager)
    assert level(module) == 1


def test_no_checkpointing_no_recomputation() -> None:
    """A model without checkpointing keeps its activations."""
    module = wrapped(Layers(4))
    module(X).backward()
    assert level(module) == 0


# ---------------------------------------------------------------------------- each repair is needed

RUN = """
import sys, pytest
from ortmodule._internal.base.repair_registry import record_unapplied_repair
from ortmodule._internal.module import import_ortmodule_with_all_repairs
record_unapplied_repair(sys.argv[1], "left out")
import_ortmodule_with_all_repairs()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[2]]))
"""
# test_compat.py has a driver of its own for its checks.
ELSEWHERE = "tracing/test_compat.py::test_each_check_passes["


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [r.name for r in REPAIR_BY_NAME.values() if not r.example.startswith(ELSEWHERE)]
)
def test_each_repair_is_needed(name: str, fresh_ort: Run) -> None:
    """Without the repair its example fails, or ONNX Runtime crashes in it."""
    import_ortmodule_with_all_repairs()
    if name not in repair_registry.applied_repair_names():
        pytest.skip("not needed on this stack")
    done = fresh_ort(RUN, name, f"{Path(__file__).parent}/{REPAIR_BY_NAME[name].example}")
    assert done.returncode in (1, -signal.SIGSEGV), done.stdout + done.stderr
    # pytest's status 1 alone could also mean other errors.
    assert done.returncode < 0 or "1 failed" in done.stdout


def test_every_repair_is_declared_and_applied() -> None:
    """Every repair has its fault and an existing example; with the known ORT all are applied."""
    # The first ORTModule of a process applies the repairs.
    wrapped(Layers(4))
    for repair in REPAIR_BY_NAME.values():
        assert repair.fault.endswith("."), repair.name
        file, _, test = repair.example.partition("::")
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0]}(" in text, repair.name
        if repair.phase_of_application() == "install":
            assert repair.name in repair_registry.applied_repair_names()
    assert repair_registry.reason_by_unapplied_repair() == {}


def test_every_module_that_declares_a_repair_is_imported() -> None:
    """pipeline.py imports each module in which a repair is declared."""
    declaring = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in ROOT.rglob("*.py")
        if "\n@repair(" in path.read_text(encoding="utf-8")
    }
    assert declaring <= {*pipeline.REPAIR_MODULES}
    assert len(declaring) > 20


def test_an_unknown_source_is_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair of an unknown source or version is not applied, and its reason is recorded."""
    for name, value in (("REPAIR_BY_NAME", {}), ("_applied", []), ("_not_applied", {})):
        monkeypatch.setattr(repair_registry, name, value)
    changed = f"{repair_registry.TRANSITION}._export_model"
    # The hash of no source.
    plant = repair_registry.repair(
        "planted", "install", 1, fault="None.", sources={changed: "0" * 16}
    )
    plant(lambda: pytest.fail("applied"))
    repair_registry.apply_repairs("install")
    assert repair_registry.applied_repair_names() == ()
    assert repair_registry.reason_by_unapplied_repair() == {
        "planted": f"the source of {changed} is not that of 1.19.2"
    }
    monkeypatch.setattr(repair_registry, "_not_applied", {})
    # Another version refuses every repair, whatever its sources.
    monkeypatch.setattr("onnxruntime.__version__", "1.20.0")
    repair_registry.apply_repairs("install")
    assert "1.20.0 is installed" in repair_registry.reason_by_unapplied_repair()["planted"]
    with pytest.raises(ValueError, match="another and planted have one order in 'install': 1"):
        repair_registry.repair("another", "install", 1)(lambda: None)

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

from ortmodule._internal import graph_cache, repairs
from ortmodule._internal.base import counters, repair_registry, source_guard
from ortmodule._internal.base.counters import tally
from ortmodule._internal.repairs import REPAIRS, apply_repairs
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
    manager = manager_of(model)
    key = manager._ortmodule_key
    call = graph_cache._collect_pass_properties(manager, (X,), {})
    assert key.difference_from_pass_or_empty_noting_changed_sizes(manager, call) == ""
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            key.difference_from_pass_or_empty_noting_changed_sizes(
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

# By repair: the test that must fail in a process without it.
WITHOUT = {
    "skip_frozen_gradients": "test_repairs.py::test_frozen_weights_have_no_gradient_in_the_graph",
    "skip_unreached_weights": "test_grad_mode.py::test_loss_and_gradients_are_eagers[a_choice-training]",
    "choose_graph_per_pass": "test_repairs.py::test_a_changed_call_is_exported_again[another number]",
    "keep_buffers_exact": "test_buffers.py::test_batch_normalization_is_eagers[trained]",
    "refuse_weight_changes": "test_weight_changes.py::test_a_pass_that_changes_weights_is_refused[.data = ...]",
    "follow_autograd_rules": "test_backward.py::test_what_only_an_unused_output_reaches_has_no_gradient[first]",
    "detect_kept_tensors": "test_escapes.py::test_a_kept_tensor_is_an_error_where_it_is_used[attribute]",
    "follow_model_state": "test_model_state.py::test_a_changed_model_is_exported_again[number]",
    "map_gradient_checkpointing": "test_repairs.py::test_checkpointing_becomes_recomputation[0-False]",
    "flush_before_redirecting": "test_printed_output.py::test_text_before_an_export_is_kept",
    "skip_ignored_labels": "test_loss.py::test_ignored_labels_are_left_out",
    "export_smoothed_cross_entropy": "test_loss.py::test_loss_and_gradients_are_eagers[smoothed-0.2]",
    "detect_traced_values": "test_python_values.py::test_another_size_is_exported_again_where_python_has_it",
    "keep_broadcast_sizes": "test_broadcasts.py::test_channels_are_weighed[adaptive]",
    "keep_sizes_of_one": "test_vectors.py::test_a_vectors_gradient_is_eagers[matrix, vector]",
    "slice_partly_derived_splits": "test_splits.py::test_parts_have_eagers_gradients[one of six, in the middle]",
    "sum_repeated_weights": "test_copied_inputs.py::test_an_operator_takes_a_weight_twice[mul]",
    "compute_constant_outputs": "test_outputs.py::test_a_constant_is_an_output[zeros]",
    "concatenate_constants": "test_gradient_names.py::test_a_part_without_a_gradient_joins_several_times[a buffer]",
    "infer_symbolic_sizes": "test_broadcasts.py::test_sizes_are_formulas[a part of it]",
    "export_grouped_conv1d_as_conv2d": "test_convolutions.py::test_onnx_runtimes_own_gradient",
    "name_frozen_gradients": "test_frozen_weights.py::test_a_gradient_passes_a_frozen_layer[GroupNorm-layer]",
    "call_torch_kernels": "test_loss.py::test_torchs_kernels_compute_the_loss",
    "restore_output_dtypes": "test_outputs.py::test_types_are_eagers[True-relu of half]",
    "copy_shared_outputs": "test_outputs.py::test_the_backward_pass_changes_no_output[probabilities]",
    "fix_deepcopy_and_pickle": "test_copies.py::test_a_copy_of_a_built_module_trains_apart[deepcopy]",
    "create_session_once": "test_options.py::test_training_sessions_are_those_that_are_needed[settings0-1]",
    "ignore_ort_export_cache": "test_exports.py::test_orts_own_cache_is_never_used",
}
RUN = """
import sys, pytest
from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps
from ortmodule._internal.repairs import apply_repairs
import_ortmodule_with_repairs_and_export_steps()
apply_repairs(sys.argv[1])
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[2]]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("repair", list(WITHOUT))
def test_each_repair_is_needed(repair: str, fresh_ort: Run) -> None:
    """Without the repair its test fails, or ONNX Runtime crashes in it."""
    file, _, test = WITHOUT[repair].partition("::")
    path = next(Path(__file__).parent.rglob(file))
    done = fresh_ort(RUN, repair, f"{path}::{test}")
    assert done.returncode in (1, -signal.SIGSEGV), done.stdout + done.stderr
    # pytest's status 1 alone could also mean other errors.
    assert done.returncode < 0 or "1 failed" in done.stdout


def test_every_repair_is_tested_and_applied() -> None:
    """Every repair is in the table, and with the known ORT all repairs are applied."""
    # The first ORTModule of a process applies the repairs.
    wrapped(Layers(4))
    # test_setting_repairs.py tests this one.
    elsewhere = {"pass_device_to_ort_grad_management"}
    assert {repair.name for repair in REPAIRS} == WITHOUT.keys() | elsewhere
    assert WITHOUT.keys() <= set(repair_registry.applied_repair_names())
    assert not WITHOUT.keys() & repair_registry.reason_by_unapplied_repair().keys()


def test_an_unknown_source_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair of an unknown source or version is not applied, and its reason is recorded."""
    monkeypatch.setattr(repair_registry, "_applied", [])
    monkeypatch.setattr(repair_registry, "_not_applied", {})
    changed = f"{source_guard.TRANSITION}._export_model"
    # The hash of no source.
    monkeypatch.setitem(source_guard.KNOWN_SOURCE_HASHES, changed, "0" * 16)
    monkeypatch.setattr(
        repairs, "REPAIRS", [repair for repair in REPAIRS if changed in repair.sources]
    )
    apply_repairs()
    assert repair_registry.applied_repair_names() == ()
    assert "skip_frozen_gradients" in repair_registry.reason_by_unapplied_repair()
    assert set(repair_registry.reason_by_unapplied_repair().values()) == {
        f"the source of {changed} is not that of 1.19.2"
    }
    monkeypatch.setattr(repair_registry, "_not_applied", {})
    # Another version refuses every repair, whatever its sources.
    monkeypatch.setattr("onnxruntime.__version__", "1.20.0")
    apply_repairs()
    assert (
        "1.20.0 is installed" in repair_registry.reason_by_unapplied_repair()["keep_buffers_exact"]
    )

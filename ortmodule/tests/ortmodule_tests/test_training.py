"""ORTModule on the installed torch: eager's values, exact counts, no fallback, settings."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.base import repair_registry
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.modules import (
    Checkpointed,
    Layers,
    Reverse,
    language_model,
    manager_of,
    same,
    training_graph,
    wrapped,
)
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort
STEPS = 6


class Reversed(nn.Module):
    """A model with gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reverse.apply(self.linear(x)).sum()


class Unexportable(nn.Module):
    """A model with an operator that the exporter lacks, for which ORT falls back if allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logcumsumexp(self.linear(x), dim=0).sum()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of several shapes and paddings; ORT exports its graph from the first."""
    # The first shape is that of the export; the others change rows, length or padding.
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 16, 0), (2, 16, 4), (3, 12, 2), (1, 8, 0), (2, 16, 6), (4, 10, 1)]
    for rows, length, padding in shapes[:STEPS]:
        ids = torch.randint(0, 99, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, length - padding :] = 0
        labels = torch.where(mask == 1, ids, torch.full_like(ids, -100))
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of the steps, and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    gradients = {}
    for batch in batches():
        loss = model(**batch)
        loss.backward()
        # The first step's only: later weights differ by rounding.
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def graph_gradients(module: Any) -> list[str]:
    """Return the names of the gradients that ORT's training graph computes."""
    outputs = training_graph(module).output
    return sorted(
        output.name.replace("_original_module.", "").replace("_grad", "") for output in outputs
    )


# ---------------------------------------------------------------------------- training equals eager


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("bert", "eager"),
        pytest.param("bert", "sdpa", marks=[pytest.mark.slow, pytest.mark.ci]),
        ("llama", "sdpa"),
        pytest.param("llama", "eager", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_training_equals_eager(witness: PassAndGraphCounters, family: str, attention: str) -> None:
    """Six AdamW steps equal eager in losses and first gradients, and ORT runs every pass."""
    model = language_model(family, attention)
    losses, gradients = trained(copy.deepcopy(model))

    ort_losses, ort_gradients = trained(wrapped(model))

    assert ort_losses == pytest.approx(losses, rel=1e-5)
    assert ort_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ort_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert (witness.forward_passes, witness.backward_passes, witness.fallbacks) == (STEPS, STEPS, 0)
    assert witness.inference_passes == 0


def test_a_language_model_without_a_mask(witness: PassAndGraphCounters) -> None:
    """A batch without a mask, for which transformers searches for documents, equals eager.

    The search in the position ids uses diff, and cumsum of booleans.
    """
    model = language_model("llama", "sdpa")
    eager = copy.deepcopy(model)
    module = wrapped(model)
    # Two shapes in one graph.
    for size in (3, 5):
        ids = torch.randint(5, 99, (size, 8 + size))
        losses = [each(input_ids=ids, labels=ids) for each in (module, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        same(model, eager)
    assert witness.forward_passes == 2


def test_evaluation_is_counted_apart(witness: PassAndGraphCounters) -> None:
    """A pass in eval mode without gradients counts as an inference pass and has eager's value."""
    model = Layers()
    x = torch.randn(4, 8)
    expected = model(x).item()

    evaluated = wrapped(model).eval()

    with torch.no_grad():
        assert evaluated(x).item() == pytest.approx(expected, rel=1e-5)
    assert (witness.inference_passes, witness.forward_passes, witness.backward_passes) == (1, 0, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_recomputation_gives_the_same_gradients(witness: PassAndGraphCounters, level: int) -> None:
    """Memory optimization does not change the gradients."""
    model = language_model("llama", "sdpa")
    eager = copy.deepcopy(model)
    batch = next(batches())

    module = wrapped(model, memory_optimization=level)
    module(**batch).backward()
    eager(**batch).backward()

    assert manager_of(module)._runtime_options.memory_optimization_level == level
    for ours, theirs in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_becomes_recomputation(witness: PassAndGraphCounters) -> None:
    """ORT's own recomputation at level 1 replaces torch.utils.checkpoint in the export."""
    model = Checkpointed(reentrant=True)
    eager = copy.deepcopy(model)
    x = torch.randn(4, 8, requires_grad=True)

    wrapped(model, memory_optimization=1)(x).backward()
    eager(x).backward()

    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)
    assert (witness.forward_passes, witness.fallbacks) == (1, 0)


# -------------------------------------------------------------------- errors for unsupported models


def test_what_cannot_be_exported_raises(witness: PassAndGraphCounters) -> None:
    """A model that ORT cannot run raises an error and does not run in plain PyTorch."""
    with pytest.raises(Exception, match="aten::logcumsumexp"):
        wrapped(Unexportable(), torch_operators="off")(torch.randn(4, 8))
    assert (witness.forward_passes, witness.fallbacks) == (0, 0)


def test_no_fallback_by_default(witness: PassAndGraphCounters) -> None:
    """A model that ORT by default would run in plain PyTorch is an error."""
    with pytest.raises(Exception, match="logcumsumexp"):
        wrapped(Unexportable(), torch_operators="off")(torch.randn(4, 8))
    assert witness.fallbacks == 0


def test_an_allowed_fallback_is_counted_with_its_reason(witness: PassAndGraphCounters) -> None:
    """An allowed fallback runs; the witness counts each one and lists each reason once."""
    module = wrapped(Unexportable(), allow_fallback=True, torch_operators="off")
    for _ in range(2):
        module(torch.randn(4, 8)).backward()
    assert (witness.forward_passes, witness.fallbacks) == (0, 2)
    # Both fallbacks have the same reason.
    assert len(witness.fallback_reasons) == 1
    assert "aten::logcumsumexp" in witness.fallback_reasons[0]


def test_a_custom_backward_is_called_or_refused(witness: PassAndGraphCounters) -> None:
    """ORT never replaces a custom backward by the derivative of its forward."""
    model = Reversed()
    x = torch.ones(2, 4)
    module = wrapped(model)
    # Without ORT's extension custom functions are refused.
    if "disable_custom_autograd" in repair_registry.applied_repair_names():
        with pytest.raises(Exception, match="Couldn't export Python operator Reverse"):
            module(x)
    else:
        module(x).backward()
        # Reversed: the derivative of the forward would be +2.
        assert model.linear.weight.grad.tolist() == [[-2.0] * 4]


# ----------------------------------------------------------------------------- settings of a module


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("threads", [1, 3])
def test_sessions_have_the_threads_asked_for(witness: PassAndGraphCounters, threads: int) -> None:
    """Each of the two sessions starts the requested threads; the caller's thread is one of them."""
    module = wrapped(Layers(), threads=threads)
    x = torch.randn(4, 8)
    # Threads of sessions from earlier tests must end before the count.
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    module(x).backward()
    assert len(os.listdir("/proc/self/task")) - before == threads - 1
    with torch.no_grad():
        module.eval()(x)
    assert len(os.listdir("/proc/self/task")) - before == 2 * (threads - 1)


def test_frozen_parameters_have_no_gradient_in_the_graph(witness: PassAndGraphCounters) -> None:
    """ORT computes gradients of trained parameters only; unfreezing one makes a new graph."""
    model = Layers()
    model.first.requires_grad_(False)
    module = wrapped(model)
    x = torch.randn(4, 8)

    module(x).backward()
    assert graph_gradients(module) == ["second.bias", "second.weight"]
    assert model.first.weight.grad is None

    model.first.requires_grad_(True)
    eager = copy.deepcopy(model)
    model.zero_grad()
    eager.zero_grad()
    module(x).backward()
    eager(x).backward()
    assert graph_gradients(module) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)


def test_settings_hold_for_one_module_and_leave_the_environment_alone(
    witness: PassAndGraphCounters,
) -> None:
    """Two modules in one process keep their own settings, and the environment is unchanged."""
    # Settings reach ORT by environment variables, which must be gone afterwards.
    before = dict(os.environ)
    plain = wrapped(Layers())
    special = wrapped(Layers(), opset=18, memory_optimization=1)
    x = torch.randn(4, 8)
    plain(x).backward()
    special(x).backward()
    assert dict(os.environ) == before
    options = [manager_of(module)._runtime_options for module in (plain, special)]
    assert [(o.onnx_opset_version, int(o.memory_optimization_level)) for o in options] == [
        (17, 0),
        (18, 1),
    ]


def test_wrapping_and_training_print_nothing(
    witness: PassAndGraphCounters, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the default log level ORT and the exporter print nothing."""
    model = language_model("llama", "sdpa")
    capfd.readouterr()
    wrapped(model)(**next(batches())).backward()
    assert capfd.readouterr() == ("", "")


class Detached(nn.Module):
    """A model with a value used with and without its gradient, a target, and a parameter's data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        target = self.other(x)
        missed = (hidden - target.detach()).square().mean() + 0.25 * (
            hidden.detach() - target
        ).square().mean()
        return (
            missed
            + (hidden * hidden.detach()).sum()
            + (hidden * self.other.weight.data.mean()).sum()
        )


def test_no_gradient_goes_through_detach(built: None) -> None:
    """Losses and gradients equal eager's, also for another batch size and in evaluation."""
    torch.manual_seed(0)
    model = Detached()
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        losses = []
        for each in (module, eager):
            each.zero_grad()
            losses.append(each(x))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        same(model, eager)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), eager.eval()(x))

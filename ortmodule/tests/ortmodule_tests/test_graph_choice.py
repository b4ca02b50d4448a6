"""The choice of a pass's graph by grad mode and the model's flags, in programs of other loops."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.swa_utils import update_bn

from ortmodule._internal import graph_cache
from ortmodule._internal.base.counters import tally
from ortmodule_tests.modules import manager_of, wrapped
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.programs import Program, Values, compare, refuse

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
X, Y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def normed() -> nn.Module:
    """Return a model with BatchNorm and a dropout of everything; training is deterministic."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(1.0), nn.Linear(8, 3)
    )


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64, bias=False), nn.Dropout(0.5), nn.Linear(64, 3, bias=False)
    )


def mixed() -> nn.Module:
    """Return a model with BatchNorm and without dropout."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def stepped(
    w: Any, m: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = w(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


# ------------------------------------------------------------------------------ grad mode and flags


def passes_without_gradient(w: Any, m: nn.Module) -> Values:
    """Case 4: train() under no_grad and inference_mode uses and updates batch statistics."""
    w.train()
    with torch.no_grad():
        one = w(X)
    with torch.inference_mode():
        two = w(Y)
    return {"one": one, "two": two, "batches": m[1].num_batches_tracked}


def inference_mode_alone(w: Any, m: nn.Module) -> Values:
    with torch.inference_mode():
        one = w(X)
        two = w(Y.clone())
        w.eval()
        return {"train": one, "train 2": two, "eval": w(X.clone()), "eval 2": w(Y)}


def averaged_statistics(w: Any, m: nn.Module) -> Values:
    """Update BatchNorm's statistics by swa_utils.update_bn after training."""
    stepped(w, m, torch.optim.SGD(m.parameters(), 0.1), X)
    update_bn([X, Y], w)
    w.eval()
    with torch.no_grad():
        return {"out": w(X)}


def a_frozen_teacher(w: Any, m: nn.Module) -> Values:
    m.requires_grad_(False)
    with torch.no_grad():
        return {"out": w(X), "next": w(Y)}


def gradients_in_evaluation(w: Any, m: nn.Module) -> Values:
    """Case 5: compute gradients in evaluation mode."""
    w.eval()
    p = X.clone().requires_grad_()
    w(p).square().mean().backward()
    return {"input": p.grad, "grad_fn": w(X).requires_grad}


def a_frozen_network(w: Any, m: nn.Module) -> Values:
    """Compute a perceptual loss: the network is frozen in eval mode, its input has a gradient."""
    m.requires_grad_(False)
    w.eval()
    p = X.clone().requires_grad_()
    loss = (w(p) - w(Y)).square().mean()
    loss.backward()
    return {"loss": loss, "input": p.grad, "detached": w(Y).requires_grad}


def adversarial(w: Any, m: nn.Module) -> Values:
    """Run FGSM: input gradients in eval mode and training steps on the changed input, in turns."""
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    losses = {}
    for step in range(3):
        w.eval()
        p = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(w(p).square().mean(), p)
        w.train()
        losses[f"loss {step}"] = stepped(w, m, optimizer, X + 0.1 * gradient.sign())
    return losses


def all_flags_set(w: Any, m: nn.Module) -> Values:
    """Case 6: set flags as Lightning does around a validation loop.

    Flags are saved before the loop, and set one by one after it.
    """
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    values = {}
    for step in range(3):
        modes = {name: module.training for name, module in w.named_modules()}
        w.eval()
        # Lightning uses either, by its settings.
        with torch.inference_mode() if step % 2 else torch.no_grad():
            values[f"validation {step}"] = w(Y).square().mean()
        for name, module in w.named_modules():
            module.training = modes[name]
        values[f"loss {step}"] = stepped(w, m, optimizer, X)
        values[f"flag {step}"] = w.training
    return values


class Holder(nn.Module):
    """A third-party module around a backbone, with a head of its own."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(3, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]])), self.head.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def a_wrapped_backbone(w: Any, m: nn.Module) -> Values:
    """Set flags as Lightning does, for a backbone inside a module."""
    holder = Holder(w)
    return {**all_flags_set(holder, holder), "head": holder.head.weight}


def a_flag_of_the_model(w: Any, m: nn.Module) -> Values:
    w.eval()
    # BatchNorm alone in training mode.
    m[1].training = True
    with torch.no_grad():
        one = w(X)
    m.train()
    loss = w(X).square().mean()
    loss.backward()
    return {"one": one, "loss": loss, "flag": w.training}


def a_flag_of_the_wrapper(w: Any, m: nn.Module) -> Values:
    """Set `training` alone, which changes only the outermost module's flag; no layer reads it."""
    w.training = False
    one = w(X)
    w.train(False)
    with torch.no_grad():
        two = w(X)
    w.training = True
    return {
        "one": one,
        "two": two,
        "flags": [layer.training for layer in m.modules()],
        "own": w.training,
    }


class Reading(nn.Module):
    """A model that reads the grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 3 if torch.is_grad_enabled() else y


def reads_the_grad_mode(w: Any, m: nn.Module) -> Values:
    values = {}
    for mode in (False, True, False, True):
        with torch.set_grad_enabled(mode):
            values[str(len(values))] = w(X)
    values["3"].sum().backward()
    return values


def attention() -> nn.Module:
    """Return a layer with a fast path of torch in evaluation mode without gradients."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def attention_in_evaluation(w: Any, m: nn.Module) -> Values:
    w.eval()
    m.requires_grad_(False)
    # The model is frozen; its input alone has a gradient.
    p = X[None].clone().requires_grad_()
    (w(p) * Y).sum().backward()
    return {"input": p.grad}


def checkpointed_masks(w: Any, m: nn.Module) -> Values:
    """Case 8: loss and gradient come from the same dropout masks."""
    values = {}
    # A non-reentrant checkpoint between two reentrant ones, on one graph.
    for reentrant in (True, False, True):
        x = X.clone().requires_grad_()
        total = torch.utils.checkpoint.checkpoint(w, x, use_reentrant=reentrant).sum()
        total.backward()
        # Without biases the output is linear in x, so its sum equals x times its gradient.
        values[str(len(values))] = bool(torch.isclose(total, (x * x.grad).sum(), rtol=1e-4))
    # The gradients are of other masks than eager's, so they are not compared.
    m.zero_grad()
    return {**values, "all": set(values.values()) == {True}}


def checkpointed_plainly(w: Any, m: nn.Module) -> Values:
    """Run checkpoints without random numbers, so that every gradient can be compared."""
    losses = {}
    for step in range(3):
        x = X.clone().requires_grad_()
        loss = torch.utils.checkpoint.checkpoint(w, x, use_reentrant=True).square().mean()
        loss.backward()
        losses.update({f"loss {step}": loss, f"input {step}": x.grad})
    return losses


PROGRAMS: dict[str, tuple[Program, Any]] = {
    "passes without gradient": (passes_without_gradient, normed),
    "inference mode alone": (inference_mode_alone, normed),
    "update_bn": (averaged_statistics, normed),
    "a frozen teacher": (a_frozen_teacher, normed),
    "gradients in evaluation": (gradients_in_evaluation, normed),
    "a frozen network": (a_frozen_network, normed),
    "adversarial": (adversarial, normed),
    "all flags set": (all_flags_set, mixed),
    "a wrapped backbone": (a_wrapped_backbone, mixed),
    "a flag of the model": (a_flag_of_the_model, normed),
    "a flag of the wrapper": (a_flag_of_the_wrapper, normed),
    "checkpointed masks": (checkpointed_masks, dropped),
    "reads the grad mode": (reads_the_grad_mode, Reading),
    "attention in evaluation": (attention_in_evaluation, attention),
    "checkpointed plainly": (
        checkpointed_plainly,
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_in_eager(name: str) -> None:
    """Losses, gradients, weights and buffers equal eager PyTorch's."""
    program, model = PROGRAMS[name]
    compare(program, model())


def test_dropout_without_gradients() -> None:
    """Case 4: MC dropout drops half of the values, with another mask in each pass."""
    module = wrapped(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    with torch.no_grad():
        one = module(torch.ones(64, 8))
        two = module(torch.ones(64, 8))
    assert 0.4 < (one == 0).float().mean() < 0.6
    assert not one.equal(two)


def test_other_masks_in_a_recomputed_pass_are_refused() -> None:
    """ORT's own dropout is refused in a recomputed pass, because its masks would differ."""
    module = wrapped(dropped(), memory_optimization=1)
    out = torch.utils.checkpoint.checkpoint(module, X.clone().requires_grad_(), use_reentrant=True)
    with pytest.raises(
        RuntimeError, match="Dropout would draw other random numbers than in the first pass"
    ):
        out.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_custom_functions_keep_nothing_without_gradients(frozen: bool) -> None:
    """A custom autograd function's saved tensors are freed if no backward pass can follow."""
    contexts: list[Any] = []

    # Weak references show whether a context, with its saved tensors, is still alive.
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            contexts.append(weakref.ref(ctx))
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    class Squared(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(super().forward(x))

    module = wrapped(Squared(8, 8).requires_grad_(not frozen))
    module(X)
    with torch.no_grad():
        module(X)
        before = len(contexts)
        for _ in range(3):
            module(X)
    # Each pass calls the function, also of a frozen model.
    assert len(contexts) == before + 3
    assert not any(context() is not None for context in contexts[before:])


# ------------------------------------------------------------------------------- calls and backward


class Optional(nn.Module):
    """A model with optional arguments and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(
        self, x: Any, mask: Any = None, other: Any = None, double: bool = False
    ) -> torch.Tensor:
        y = self.layer(x) * self.factor
        if mask is not None:
            y = y * mask
        if other is not None:
            y = y + other
        return y.tanh() * 2 if double else y.tanh()


CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "named, then left out": [((X,), {"mask": Y}), ((X,), {})],
    "by position, then left out": [((X, Y), {}), ((X,), {})],
    "by position, then named": [((X, Y), {}), ((X,), {"mask": Y})],
    "another one named": [((X,), {"mask": Y}), ((X,), {"other": Y}), ((X, Y), {"other": Y})],
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_in_turns(name: str) -> None:
    """Case 14: arguments may be left out, or passed by position after they were named."""

    def calls(w: Any, m: nn.Module) -> Values:
        losses = {
            str(place): w(*args, **kwargs).square().mean()
            # Twice, so that each call also meets the graphs of the later ones.
            for place, (args, kwargs) in enumerate(2 * CALLS[name])
        }
        sum(losses.values()).backward()
        return losses

    compare(calls, Optional())


def backward_twice(w: Any, m: nn.Module) -> Values:
    loss = w(X).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return {"loss": loss}


def test_backward_twice_is_refused() -> None:
    """A second backward pass raises torch's own message and a remedy."""
    refuse(
        backward_twice,
        mixed(),
        "Trying to backward through the graph a second time.*Call the module again",
    )


# ------------------------------------------------------------------------------ the last few graphs


def flags_in_turns(w: Any, m: Any, step: int) -> Any:
    return w(X, double=step % 2 == 0)


def none_in_turns(w: Any, m: Any, step: int) -> Any:
    return w(X, Y if step % 2 else None)


def values_in_turns(w: Any, m: Any, step: int) -> Any:
    m.factor = 1.0 + step % 2
    return w(X)


def freezing_in_turns(w: Any, m: Any, step: int) -> Any:
    m.layer.bias.requires_grad_(step % 2 == 0)
    return w(X)


@pytest.mark.parametrize(
    "turn", [flags_in_turns, none_in_turns, values_in_turns, freezing_in_turns]
)
def test_the_last_few_graphs_are_kept(turn: Any) -> None:
    """Alternating calls are exported once each, and all values equal eager's."""
    before = tally.exports

    def program(w: Any, m: Any) -> Values:
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        losses = {}
        for step in range(6):
            optimizer.zero_grad()
            losses[f"loss {step}"] = loss = turn(w, m, step).square().mean()
            loss.backward()
            optimizer.step()
            w.eval()
            with torch.no_grad():
                losses[f"evaluated {step}"] = turn(w, m, step).square().mean()
            w.train()
        return losses

    compare(program, Optional())
    # Two alternatives, each in training and in evaluation mode.
    assert tally.exports - before <= 4


def test_dropped_graphs_are_freed_and_reported() -> None:
    """The least recently used graph is freed beyond KEPT graphs, and many exports are noted."""
    module = wrapped(Optional())
    module(X, double=True)
    first = weakref.ref(manager_of(module))
    agent = weakref.ref(manager_of(module)._onnx_models)
    # Each factor is another Python value, so each pass exports a graph.
    for step in range(2 * graph_cache.KEPT_GRAPHS):
        module.module.factor = 2.0 + step
        assert first() is not None or step >= graph_cache.KEPT_GRAPHS - 1
        module(X)
    gc.collect()
    assert (first(), agent()) == (None, None)
    assert any(
        note.startswith(f"{2 * graph_cache.KEPT_GRAPHS} graphs were exported of one model")
        for note in tally.notes
    )


def test_replaced_weights_are_followed() -> None:
    """A graph of replaced weights is never used again."""

    def program(w: Any, m: Any) -> Values:
        values = {"one": w(X), "two": w(X, double=True)}
        m.layer = nn.Linear(8, 8, bias=False)
        torch.nn.init.constant_(m.layer.weight, 0.25)
        return {**values, "three": w(X), "four": w(X, double=True)}

    compare(program, Optional())


# ---------------------------------------------------------------------------------------- Lightning


@pytest.mark.slow
@pytest.mark.ci
# Lightning gives warnings of its own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("averaged", [False, True])
def test_lightning_validates_in_between(averaged: bool, tmp_path: Path) -> None:
    """A wrapped backbone equals eager under Lightning's validation loop and weight averaging."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Regression(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, backbone: Any) -> None:
            super().__init__()
            self.holder = Holder(backbone)
            self.values = dict[str, Any]()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.holder(batch[0]).square().mean()
            self.values[f"loss {self.global_step}"] = loss.detach()
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.values[f"validation {self.global_step}.{index}"] = (
                self.holder(batch[0]).square().mean()
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def program(w: Any, m: nn.Module) -> Values:
        rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
        regression = Regression(w)
        callbacks = [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)] if averaged else []
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        lightning.Trainer(
            max_epochs=2, val_check_interval=5, accelerator="cpu", default_root_dir=tmp_path, callbacks=callbacks,
            enable_model_summary=False, **quiet,
        ).fit(regression, batches, batches)  # fmt: skip
        assert len([name for name in regression.values if name.startswith("loss")]) >= 20
        return {**regression.values, "head": regression.holder.head.weight}

    compare(program, mixed())

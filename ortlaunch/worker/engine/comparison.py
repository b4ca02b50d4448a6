"""Comparison of plain PyTorch with an engine's module, for one micro batch and the same weights.

This module also switches dropout off during the comparison. The comparison has no side effects: it
writes no `.grad`, and it restores weights, buffers and random states. The module is independent of
the engines and must not import onnxruntime or deepspeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from ortlaunch.errors import EngineError
from ortlaunch.precisions import PRECISIONS
from ortlaunch.worker.engine.allocator import give_back_freed_memory
from ortlaunch.worker.engine.differences import Comparison, Pass, Tensors, compared, exact, judged
from ortlaunch.worker.engine.draws import Draws, Replaying
from ortlaunch.worker.engine.float64 import in_float64
from ortlaunch.worker.model.matmul_precision import matmul_precision
from ortlaunch.worker.model.model import whole_logits
from ortlaunch.worker.model.own_numbers import loss_in
from ortlaunch.worker.model.precision import narrow_dtype_of


def compare(
    reference: nn.Module,
    module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    *,
    precision: str = "fp32",
    autocast: bool = False,
    tolerance: float | None = None,
) -> Comparison:
    """Compare forward and backward of `batch` through `reference` and through `module`.

    Both passes run without dropout and with exact matmuls. If they differ by more than the
    tolerance in fp32, the reference also runs in float64. A difference from PyTorch that is as
    large as PyTorch's own difference from float64 is rounding.

    Args:
        reference: returns the loss of `batch`. Its forward is called directly, without
            torch.compile and without the module's hooks.
        module: the same model on an engine, with the same parameter objects. If the model has
            dropout, it must be exported with dropout off (see `dropouts`), because an ONNX graph
            keeps the ratio of its export.
        batch: one micro batch, as arguments by name.
        precision: fp32, fp16 or bf16: the precision of the passes. It sets the limits of rounding
            (`PRECISIONS`).
        autocast: run both passes under autocast to `precision`. If false, weights and batch are
            already in that precision.
        tolerance: replaces the precision's own tolerance.

    Raises:
        DrawsNumbers: the model draws random numbers beside dropout, and not the same in both passes.
    """
    model = reference.model if isinstance(reference, Replaying) else reference
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    limits = PRECISIONS[precision]
    device = next(iter(trained.values())).device
    tolerance = tolerance or limits.tolerance
    dtype = narrow_dtype_of(precision) if autocast else None

    def passed(
        call: Callable[..., torch.Tensor],
        wanted: Mapping[str, nn.Parameter],
        precisely: bool = False,
    ) -> Pass:
        lowered = torch.autocast(device.type, dtype, enabled=dtype is not None)
        # The state is saved first, outside the casts, so that it is saved in its own precision.
        with _state_kept(model) as moved, lowered, in_float64(batch, precisely) as given:
            loss, gradients = _derived(call, given, wanted, limits.scale)
        return Pass(loss, gradients, moved)

    devices = [device] if device.type == "cuda" else []
    # At the highest precision, to compare the engines and not TF32 or oneDNN's bfloat16.
    with torch.random.fork_rng(devices), without_dropout(reference), matmul_precision("highest"):
        before = _random_state(device)
        with _as_reference(model):
            theirs = passed(reference.forward, trained)
        after = _random_state(device)
        _set_random_state(device, before)
        # Otherwise the memory that PyTorch's pass has freed would stay beside the module's.
        give_back_freed_memory()
        ours = passed(module, trained)
        # Torch draws inside ONNX Runtime's graph, too; only the same numbers can be compared.
        draws = not torch.equal(before, after)
        if draws and not torch.equal(_random_state(device), after):
            raise DrawsNumbers
        found = compared(ours, theirs, limits)._replace(draws=int(draws))
        if limits.is_narrow or found.largest <= tolerance:
            return found
        # Float64 takes twice the memory: only the gradients in question are kept and computed.
        chosen = {each.name for each in found.gradients if each.value > tolerance}
        ours = ours.with_gradients(chosen)
        theirs = theirs.with_gradients(chosen)
        try:
            with _as_reference(model):
                wanted = {name: trained[name] for name in chosen}
                in_wide = passed(reference.forward, wanted, precisely=True)
        # A model may fail in float64 for any reason; the comparison is then without this judgement.
        except Exception as error:
            return found._replace(not_judged=str(error) or type(error).__name__)
        norm = found.reference_norm
        our, their = (compared(each, in_wide, limits, norm) for each in (ours, theirs))
        return judged(found, our, their, tolerance)


def compare_with_draws(
    reference: nn.Module,
    module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    replaying: Callable[[Replaying], Callable[..., torch.Tensor]] | None,
    **terms: Any,
) -> Comparison:
    """Run `compare`; if the model draws random numbers, record them and pass them to both passes.

    Args:
        reference: see `compare`.
        module: see `compare`.
        batch: see `compare`.
        replaying: makes the engine's module of a model that receives its random numbers as inputs.
            None: such models are not compared.
        terms: further arguments of `compare`.

    Raises:
        DrawsNumbers: the model draws random numbers that cannot be passed to both.
    """
    own: Comparison | None = None
    try:
        own = compare(reference, module, batch, **terms)
        limit = terms.get("tolerance") or PRECISIONS[terms.get("precision", "fp32")].tolerance
        # A difference may be one of the numbers' order.
        if not own.draws or replaying is None or own.largest <= limit:
            return own._replace(draws=0)
    except DrawsNumbers:
        if replaying is None:
            raise
    parameter = next(reference.parameters())
    with (
        torch.random.fork_rng([parameter.device] if parameter.is_cuda else []), without_dropout(reference),
        whole_logits(reference), _state_kept(reference), torch.no_grad(), Draws() as draws,
    ):  # fmt: skip
        reference.forward(**batch)
    given = Replaying(reference)
    try:
        found = compare(given, replaying(given), {**batch, "draws": draws.recorded}, **terms)
    except DrawsNumbers:
        if own is None:
            raise
        return own._replace(draws=0)
    return found._replace(draws=len(draws.recorded))


def compare_evaluation(
    reference: nn.Module,
    module: nn.Module,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> tuple[float, float] | None:
    """Return the loss of an evaluation pass through `module`, and through `reference`.

    Layers such as nn.TransformerEncoder compute otherwise in evaluation.

    Args:
        reference: see `compare`.
        module: the engine's module, with the same parameter objects.
        batch: see `compare`.
        dtype: of autocast; None without it.

    Returns:
        None if the model draws random numbers in evaluation, too.
    """
    device = next(reference.parameters()).device
    devices = [device] if device.type == "cuda" else []
    modes = [(layer, layer.training) for each in (reference, module) for layer in each.modules()]
    with (
        torch.random.fork_rng(devices), torch.no_grad(), _state_kept(reference), matmul_precision("highest"),
        torch.autocast(device.type, dtype, enabled=dtype is not None),
    ):  # fmt: skip
        before = _random_state(device)
        try:
            for each in (reference, module):
                each.eval()
            with _as_reference(reference):
                theirs = float(loss_in(reference.forward(**batch)))
            if not torch.equal(_random_state(device), before):
                return None
            return float(loss_in(module(**batch))), theirs
        finally:
            for layer, mode in modes:
                layer.training = mode


class DrawsNumbers(EngineError):
    """A model draws random numbers that differ between two passes."""

    def __init__(self) -> None:
        super().__init__(
            "the model draws random numbers in forward that cannot be given to both, so that its "
            "passes cannot be compared"
        )


@contextlib.contextmanager
def _as_reference(model: nn.Module) -> Iterator[None]:
    """Compute whole logits, without reentrant checkpoints, while the context is open."""
    # autograd.grad does not reach weights inside a reentrant checkpoint.
    function = torch.utils.checkpoint.CheckpointFunction
    with (
        whole_logits(model),
        mock.patch.object(function, "apply", lambda run, _, *inputs: run(*inputs)),
    ):
        yield


def _derived(
    call: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    scale: float,
) -> tuple[float, Tensors]:
    """Return the loss and its gradients."""
    loss = loss_in(call(**batch))
    if not parameters:
        return float(loss.detach()), {}
    # backward() would run the hooks by which DistributedDataParallel and DeepSpeed get gradients.
    gradients = torch.autograd.grad(
        loss.float() * scale, tuple(parameters.values()), allow_unused=True
    )
    return float(loss.detach()), dict(zip(parameters, gradients))


def dropouts(model: nn.Module) -> list[tuple[object, str, float]]:
    """Return (owner, attribute, value) of every dropout above 0.

    Owners are modules and the configs of modules.
    """
    owners = {
        id(owner): owner for m in model.modules() for owner in (m, getattr(m, "config", None))
    }
    return [
        (owner, name, value)
        for owner in owners.values()
        for name, value in getattr(owner, "__dict__", {}).items()
        if _is_dropout(owner, name) and type(value) in (int, float) and value > 0
    ]


def _is_dropout(owner: object, name: str) -> bool:
    """Return whether an attribute is a dropout ratio.

    It is `p` of nn.Dropout and similar classes, and attention_dropout, resid_pdrop, drop_prob,
    layerdrop and similar names of any owner.
    """
    return "drop" in name.lower() or (name == "p" and "drop" in type(owner).__name__.lower())


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout of the model to 0 while the context is open; training mode stays on."""
    found = dropouts(model)
    try:
        for owner, name, _ in found:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restore weights and buffers at the end; yield a dictionary of the changes of the pass.

    The dictionary is filled at the end, with the difference of each tensor that changed, by name.
    """
    kept = {
        name: (tensor, tensor.data, tensor.detach().clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    moved: dict[str, torch.Tensor] = {}
    try:
        yield moved
    finally:
        with torch.no_grad():
            for name, (tensor, data, value) in kept.items():
                # A tensor of another shape is a table that grew: it has no difference to report.
                if tensor.shape == value.shape and not _equal(tensor, value):
                    moved[name] = exact(tensor.detach()) - exact(value)
                # The pass may have replaced `.data` or written into it: undo both.
                tensor.data = data
                if not _equal(data, value):
                    data.copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are the same; nan equals nan."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)

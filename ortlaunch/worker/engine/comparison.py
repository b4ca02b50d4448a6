"""One micro batch through plain PyTorch and through an engine's module, on the same weights: how far apart they are.

Owns the comparison, and switching dropout off around it. Leaves no trace: gradients go to nobody's `.grad`; weights,
buffers and random numbers are put back. Knows no engine; must not import onnxruntime or deepspeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from ortlaunch.errors import EngineError
from ortlaunch.precisions import PRECISIONS
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
    """Forward and backward of `batch` through `reference` and `module`, dropout off and products exact in both.

    Where they differ by more than the tolerance in fp32, the reference also runs in float64: what is as far from
    PyTorch as PyTorch is from float64 is rounding.

    Args:
        reference: returns the loss of `batch`; its forward is called past torch.compile and hooks of its own.
        module: the same model on an engine, holding the same parameter objects, exported with dropout off if the
            model has any: an ONNX graph keeps the ratio that it was exported with (see `dropouts`).
        precision: fp32, fp16 or bf16, of the passes: sets what counts as rounding (`PRECISIONS`).
        autocast: run both passes under autocast to `precision`; else weights and batch are in it already.
        tolerance: in place of the precision's own.

    Raises:
        DrawsNumbers: the model draws random numbers beside dropout, so that two passes cannot be the same.
    """
    model = reference.model if isinstance(reference, Replaying) else reference
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    limits = PRECISIONS[precision]
    device = parameters[0].device
    tolerance = tolerance or limits.tolerance
    dtype = narrow_dtype_of(precision) if autocast else None

    def passed(call: Callable[..., torch.Tensor], precisely: bool = False) -> Pass:
        lowered = torch.autocast(device.type, dtype, enabled=dtype is not None)
        # In this order: what is kept and put back is kept in its own precision.
        with _state_kept(model) as moved, lowered, in_float64(batch, precisely) as given:
            loss, gradients = _derived(call, given, parameters, limits.scale)
        return Pass(loss, gradients, moved)

    devices = [device] if device.type == "cuda" else []
    # What is compared is the engine, not the unit that multiplies.
    with torch.random.fork_rng(devices), without_dropout(reference), matmul_precision("highest"):
        before = _random_state(device)
        with _as_reference(model):
            theirs = passed(reference.forward)
        if not torch.equal(_random_state(device), before):
            raise DrawsNumbers
        ours = passed(module)
        found = compared(names, ours, theirs, limits)
        if limits.is_narrow or found.largest <= tolerance:
            return found
        try:
            with _as_reference(model):
                in_wide = passed(reference.forward, precisely=True)
        except Exception as error:  # whatever a model has against float64
            return found._replace(not_judged=str(error) or type(error).__name__)
        errors = compared(names, ours, in_wide, limits), compared(names, theirs, in_wide, limits)
        return judged(found, *errors, tolerance)


def compare_with_draws(
    reference: nn.Module,
    module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    replaying: Callable[[Replaying], Callable[..., torch.Tensor]] | None,
    **terms: Any,
) -> Comparison:
    """`compare`; random numbers that the model draws are recorded, and given to both passes.

    replaying: the engine's module of a model that is given its random numbers; None: such models are not compared.

    Raises:
        DrawsNumbers: the model draws random numbers that cannot be given to both.
    """
    try:
        return compare(reference, module, batch, **terms)
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
    found = compare(given, replaying(given), {**batch, "draws": draws.recorded}, **terms)
    return found._replace(draws=len(draws.recorded))


class DrawsNumbers(EngineError):
    """A model draws random numbers that two passes do not share."""

    def __init__(self) -> None:
        super().__init__(
            "the model draws random numbers in its forward, which cannot be recorded and given to both: no two passes "
            "are the same"
        )


@contextlib.contextmanager
def _as_reference(model: nn.Module) -> Iterator[None]:
    """Whole logits, and no reentrant checkpoints, whose weights autograd.grad cannot see."""
    function = torch.utils.checkpoint.CheckpointFunction
    with (
        whole_logits(model),
        mock.patch.object(function, "apply", lambda run, _, *inputs: run(*inputs)),
    ):
        yield


def _derived(
    call: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    parameters: Sequence[nn.Parameter],
    scale: float,
) -> tuple[float, Tensors]:
    """The loss and its gradients."""
    loss = loss_in(call(**batch))
    # Not backward(): that would run the hooks by which DistributedDataParallel and DeepSpeed take gradients.
    return float(loss.detach()), torch.autograd.grad(
        loss.float() * scale, parameters, allow_unused=True
    )


def dropouts(model: nn.Module) -> list[tuple[object, str, float]]:
    """(owner, attribute, value) of every dropout above 0: of modules, of modules' numbers, of their configs."""
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
    """`p` of nn.Dropout and its kin; attention_dropout, resid_pdrop, drop_prob, layerdrop ... of any owner."""
    return "drop" in name.lower() or (name == "p" and "drop" in type(owner).__name__.lower())


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """While open, every dropout of the model is 0, in training mode."""
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
    """Weights and buffers are afterwards what they were; yields, filled at the end, how far the pass had moved them."""
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
                if tensor.shape == value.shape and not _equal(
                    tensor, value
                ):  # one of another shape is a table that grew
                    moved[name] = exact(tensor.detach()) - exact(value)
                tensor.data = data
                if not _equal(data, value):
                    data.copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are the same; nan is nan."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()

"""One micro batch through plain PyTorch and through an engine's module, on the same weights: how far apart they are.

Owns the comparison, and switching dropout off around it. Leaves no trace: gradients go to nobody's `.grad`, buffers and
random numbers are put back. Knows no engine; must not import onnxruntime or deepspeed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import EngineError
from ortlaunch.worker.matmul_precision import matmul_precision
from ortlaunch.worker.model import whole_logits
from ortlaunch.worker.own_numbers import loss_in

Gradients = Sequence["torch.Tensor | None"]
# A loss near zero has no relative difference; those of training are of order one.
LEAST_LOSS = 1e-3


class Limits(NamedTuple):
    """What is a difference, and what is rounding, in one precision."""

    tolerance: float
    """Above it, the largest relative difference is no rounding."""
    floor: float
    """A gradient is measured against its own norm, or this share of the norm of all gradients if that is more.

    Some gradients are zero but for rounding, as those of attention's key biases: against their own norm, rounding would
    count as a difference of 100 %. What is left of terms that cancel is some roundings of those terms, which are at
    most of the size of the whole gradient: tolerance x floor is about ten roundings in fp32 (1e-6), two in fp16 (2e-3)
    and one in bf16 (1e-2). A wrong gradient smaller than that share of the whole passes unseen.
    """
    scale: float
    """Factor on the loss before the backward pass, so that small gradients do not vanish in fp16."""


LIMITS = {
    "fp32": Limits(1e-3, 1e-3, 1.0),
    "fp16": Limits(5e-2, 5e-2, 1024.0),
    "bf16": Limits(2e-1, 5e-2, 1.0),
}


class Difference(NamedTuple):
    """One parameter's gradient, engine against plain PyTorch."""

    name: str
    value: float
    """Norm of the difference / norm of the reference, float64; inf where a number is not finite."""
    norm: float
    reference_norm: float


class Comparison(NamedTuple):
    """What one micro batch showed."""

    loss: float
    reference_loss: float
    loss_difference: float
    gradients: tuple[Difference, ...]
    """Every trained parameter, the largest difference first."""

    @property
    def gradient_difference(self) -> float:
        """The largest of all trained parameters."""
        return self.gradients[0].value if self.gradients else 0.0

    @property
    def largest(self) -> float:
        """Of loss and gradients: what a tolerance is held against."""
        return max(self.loss_difference, self.gradient_difference)


def compare(
    reference: nn.Module,
    module: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    *,
    precision: str = "fp32",
    autocast: bool = False,
) -> Comparison:
    """Forward and backward of `batch` through `reference` and `module`, dropout off and products exact in both.

    Args:
        reference: returns the loss of `batch`; its forward is called past torch.compile and hooks of its own.
        module: the same model on an engine, holding the same parameter objects, exported with dropout off if the
            model has any: an ONNX graph keeps the ratio that it was exported with (see `dropouts`).
        precision: fp32, fp16 or bf16, of the passes: sets what counts as rounding (`LIMITS`).
        autocast: run both passes under autocast to `precision`; else weights and batch are in it already.

    Raises:
        EngineError: the model draws random numbers beside dropout, so that two passes cannot be the same.
    """
    names, parameters = zip(*((n, p) for n, p in reference.named_parameters() if p.requires_grad))
    limits, device = LIMITS[precision], parameters[0].device
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision] if autocast and precision != "fp32" else None

    def passed(call: Callable[..., torch.Tensor]) -> tuple[float, Gradients]:
        with _buffers_kept(reference), torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = loss_in(call(**batch))
            # Not backward(): that would run the hooks by which DistributedDataParallel and DeepSpeed take gradients.
            return float(loss.detach()), torch.autograd.grad(loss.float() * limits.scale, parameters, allow_unused=True)

    devices = [device] if device.type == "cuda" else []
    # What is compared is the engine, not the unit that multiplies.
    with torch.random.fork_rng(devices), without_dropout(reference), matmul_precision("highest"):
        before = _random_state(device)
        with whole_logits(reference):
            theirs = passed(reference.forward)
        if not torch.equal(_random_state(device), before):
            raise EngineError(
                "the model draws random numbers in its forward besides the dropout that can be switched off: no two "
                "passes are the same"
            )
        ours = passed(module)
    loss_difference = abs(ours[0] - theirs[0]) / max(abs(theirs[0]), LEAST_LOSS)
    gradients = _differences(names, ours[1], theirs[1], limits)
    return Comparison(ours[0], theirs[0], _or_infinite(loss_difference), gradients)


def _differences(names: Sequence[str], ours: Gradients, theirs: Gradients, limits: Limits) -> tuple[Difference, ...]:
    """Differences of all gradients, the largest first; no gradient is one of zeros."""
    norms = [_norm(gradient) for gradient in theirs]
    floor = limits.floor * math.hypot(*norms)
    found = []
    for name, our, their, reference_norm in zip(names, ours, theirs, norms):
        apart = _norm(our if their is None else their if our is None else our.double() - their.double())
        value = apart / max(reference_norm, floor) if apart else 0.0
        found.append(Difference(name, _or_infinite(value), _norm(our) / limits.scale, reference_norm / limits.scale))
    return tuple(sorted(found, key=lambda difference: -difference.value))


def _norm(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def dropouts(model: nn.Module) -> list[tuple[Any, str, float]]:
    """(owner, attribute, value) of every dropout above 0: of modules, of modules' numbers, of their configs."""
    owners = {id(owner): owner for m in model.modules() for owner in (m, getattr(m, "config", None))}
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
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """BatchNorm's statistics, and other buffers, are afterwards what they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
    return torch.get_rng_state()

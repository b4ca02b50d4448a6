"""How far one pass is from another: loss, gradients, and what it changed; and what of that is rounding.

Tolerances are in the table of precisions. Knows no model and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ortlaunch.precisions import Precision

Tensors = Sequence["torch.Tensor | None"]
# A loss near zero has no relative difference; those of training are of order one.
LEAST_LOSS = 1e-3


ROUNDING = 10
"""In fp32 a difference is rounding if the engine is no more than this many times as far from float64 as PyTorch is."""
CAP = 10
"""Above this many times the tolerance a difference is rounding only if the engine itself is within the tolerance of
float64: a model whose passes differ is far from float64, too."""


class Difference(NamedTuple):
    """One parameter's gradient, or what a pass left of a weight or buffer: engine against plain PyTorch."""

    name: str
    value: float
    """Norm of the difference / norm of the reference, float64; inf where a number is not finite."""
    norm: float
    reference_norm: float
    rounding: bool = False
    """Whether it is above the tolerance and float64 shows that it is rounding."""


class Comparison(NamedTuple):
    """What one micro batch showed."""

    loss: float
    reference_loss: float
    loss_difference: float
    gradients: tuple[Difference, ...]
    """Every trained parameter, the largest difference first, then those that are rounding."""
    state: tuple[Difference, ...] = ()
    """Every weight and buffer that a pass changed, in the same order."""
    loss_is_rounding: bool = False
    draws: int = 0
    """How many tensors of random numbers were recorded and given to both passes."""
    not_judged: str = ""
    """Why float64 could not show whether a difference is rounding."""

    @property
    def gradient_difference(self) -> float:
        """The largest of all trained parameters; that of rounding does not count."""
        return _largest(self.gradients)

    @property
    def state_difference(self) -> float:
        """The same of weights and buffers that a pass changed."""
        return _largest(self.state)

    @property
    def rounding(self) -> list[str]:
        """What is above the tolerance and, as float64 shows, rounding."""
        names = [each.name for each in (*self.gradients, *self.state) if each.rounding]
        return [*(["loss"] if self.loss_is_rounding else []), *names]

    @property
    def largest(self) -> float:
        """Of loss, gradients and state: what a tolerance is held against."""
        return max(0.0 if self.loss_is_rounding else self.loss_difference, self.gradient_difference,
                   self.state_difference)  # fmt: skip


def _largest(differences: Sequence[Difference]) -> float:
    return max((each.value for each in differences if not each.rounding), default=0.0)


class Pass(NamedTuple):
    """What a forward and backward pass gave."""

    loss: float
    gradients: Tensors
    state: dict[str, torch.Tensor]
    """How far the pass moved weights and buffers; of those alone that it changed."""


def compared(names: Sequence[str], ours: Pass, theirs: Pass, limits: Precision) -> Comparison:
    """How far a pass is from another."""
    loss_difference = abs(ours.loss - theirs.loss) / max(abs(theirs.loss), LEAST_LOSS)
    gradients = _differences(names, ours.gradients, theirs.gradients, limits.floor, limits.scale)
    moved = sorted({*ours.state, *theirs.state})
    our, their = ([each.state.get(name) for name in moved] for each in (ours, theirs))
    state = _differences(moved, our, their, limits.floor)
    return Comparison(ours.loss, theirs.loss, _or_infinite(loss_difference), gradients, state)


def judged(found: Comparison, ours: Comparison, theirs: Comparison, tolerance: float) -> Comparison:
    """`found`, with what is rounding by how far the engine and PyTorch are from float64."""

    def is_rounding(value: float, our: float, their: float) -> bool:
        near = value <= CAP * tolerance and our <= ROUNDING * their
        return value > tolerance and (our <= tolerance or near)

    def marked(
        all_found: Sequence[Difference], *errors: Sequence[Difference]
    ) -> tuple[Difference, ...]:
        our, their = ({each.name: each.value for each in of_one} for of_one in errors)
        judged = [
            each._replace(
                rounding=is_rounding(
                    each.value, our.get(each.name, math.inf), their.get(each.name, 0.0)
                )
            )
            for each in all_found
        ]
        return tuple(sorted(judged, key=lambda each: (each.rounding, -each.value)))

    return found._replace(
        gradients=marked(found.gradients, ours.gradients, theirs.gradients),
        state=marked(found.state, ours.state, theirs.state),
        loss_is_rounding=is_rounding(
            found.loss_difference, ours.loss_difference, theirs.loss_difference
        ),
    )


def _differences(
    names: Sequence[str], ours: Tensors, theirs: Tensors, floor: float, scale: float = 1.0
) -> tuple[Difference, ...]:
    """Differences of all tensors, the largest first; none is one of zeros."""
    norms = [_norm(tensor) for tensor in theirs]
    least = floor * math.hypot(*norms)
    found = []
    for name, our, their, reference_norm in zip(names, ours, theirs, norms):
        apart = _norm(our if their is None else their if our is None else exact(our) - exact(their))
        value = apart / (max(reference_norm, least) or math.ulp(0.0)) if apart else 0.0
        found.append(
            Difference(name, _or_infinite(value), _norm(our) / scale, reference_norm / scale)
        )
    return tuple(sorted(found, key=lambda difference: -difference.value))


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(exact(tensor)))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf

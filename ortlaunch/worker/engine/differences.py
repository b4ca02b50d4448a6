"""Differences between two passes in loss, gradients and state, and which of them are rounding.

The tolerances are in the table of precisions. This module is independent of models and engines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ortlaunch.precisions import Precision

Tensors = Mapping[str, "torch.Tensor | None"]
# A loss near zero has no useful relative difference. Losses of training are of order one.
LEAST_LOSS = 1e-3


ROUNDING = 10
"""The largest ratio of the engine's error to PyTorch's error that counts as rounding in fp32.

Both errors are distances from float64.
"""
# Names in a message.
_FEW = 3
CAP = 10
"""The multiple of the tolerance above which a small ratio of errors does not prove rounding.

Above it, a difference is rounding only if the engine itself is within the tolerance of float64: a
model whose passes differ is far from float64, too.
"""

FAR_FROM_FLOAT64 = 0.1
"""The distance of PyTorch's value from float64 that rounding does not explain.

Beyond it, the pass in float64 computes something else than PyTorch, and cannot judge: for example,
it lacks a gradient.
"""


class Difference(NamedTuple):
    """The difference between engine and plain PyTorch in one tensor.

    The tensor is the gradient of a parameter, or the change of a weight or buffer by a pass.
    """

    name: str
    value: float
    """Norm of the difference / norm of the reference, in float64; inf if a value is not finite."""
    norm: float
    reference_norm: float
    rounding: bool = False
    """Whether the difference is above the tolerance and float64 shows that it is rounding."""


class Comparison(NamedTuple):
    """The result of comparing two passes of one micro batch."""

    loss: float
    reference_loss: float
    loss_difference: float
    gradients: tuple[Difference, ...]
    """Every trained parameter, the largest difference first; those that are rounding at the end."""
    state: tuple[Difference, ...] = ()
    """Every weight and buffer that a pass changed, in the same order."""
    loss_is_rounding: bool = False
    draws: int = 0
    """The number of random tensors that were recorded and passed to both passes; of `compare` alone,
    whether both draw."""
    not_judged: str = ""
    """Why the values show nothing, or float64 not whether a difference is rounding; else empty."""
    evaluation: tuple[float, float] | None = None
    """The engine's and PyTorch's loss of an evaluation pass, if one was compared."""

    @property
    def reference_norm(self) -> float:
        """The norm of all gradients of the reference."""
        return math.hypot(*(each.reference_norm for each in self.gradients))

    @property
    def gradient_difference(self) -> float:
        """The largest difference of a gradient; rounding does not count."""
        return _largest(self.gradients)

    @property
    def state_difference(self) -> float:
        """The largest difference of a weight or buffer that a pass changed, without rounding."""
        return _largest(self.state)

    @property
    def rounding(self) -> list[str]:
        """The names of differences that are above the tolerance and are rounding, by float64."""
        names = [each.name for each in (*self.gradients, *self.state) if each.rounding]
        return [*(["loss"] if self.loss_is_rounding else []), *names]

    @property
    def evaluation_difference(self) -> float:
        """The relative difference of the loss in evaluation; 0 if it was not compared."""
        ours, theirs = self.evaluation or (0.0, 0.0)
        return 0.0 if repr(ours) == repr(theirs) else _relative(ours, theirs)

    @property
    def largest(self) -> float:
        """The largest difference of loss, gradients and state, to be compared with a tolerance."""
        return max(0.0 if self.loss_is_rounding else self.loss_difference, self.gradient_difference,
                   self.state_difference, self.evaluation_difference)  # fmt: skip


def _largest(differences: Sequence[Difference]) -> float:
    return max((each.value for each in differences if not each.rounding), default=0.0)


class Pass(NamedTuple):
    """The results of a forward and backward pass."""

    loss: float
    gradients: Tensors
    state: dict[str, torch.Tensor]
    """The changes of weights and buffers by the pass; only of those that it changed."""

    def with_gradients(self, names: Collection[str]) -> Pass:
        """Return the pass with some of its gradients."""
        return self._replace(gradients={name: self.gradients[name] for name in names})


def compared(
    ours: Pass,
    theirs: Pass,
    limits: Precision,
    reference_norm: float | None = None,
) -> Comparison:
    """Return the differences between two passes.

    Args:
        ours: the engine's pass.
        theirs: the reference's pass.
        limits: the precision of both.
        reference_norm: of all gradients of the model; None: `theirs` has all of them.
    """
    # repr, because nan is not equal to itself.
    if repr(ours.loss) == repr(theirs.loss) and not math.isfinite(ours.loss):
        why = f"the loss is {ours.loss} in plain PyTorch, too"
        return Comparison(ours.loss, theirs.loss, 0.0, (), not_judged=why)
    loss_difference = _relative(ours.loss, theirs.loss)
    if reference_norm is None:
        reference_norm = _norm_of_all(theirs.gradients) / limits.scale
    least = limits.floor * reference_norm * limits.scale
    gradients = _differences(ours.gradients, theirs.gradients, least, limits.scale)
    least = limits.floor * _norm_of_all(theirs.state)
    moved = sorted({*ours.state, *theirs.state})
    our, their = ({name: each.state.get(name) for name in moved} for each in (ours, theirs))
    state = _differences(our, their, least)
    return Comparison(ours.loss, theirs.loss, loss_difference, gradients, state)


def judged(found: Comparison, ours: Comparison, theirs: Comparison, tolerance: float) -> Comparison:
    """Return `found` with its rounding marked, or with the reason why float64 cannot judge it.

    Args:
        found: the engine's differences from PyTorch.
        ours: the engine's differences from float64.
        theirs: PyTorch's differences from float64.
        tolerance: the largest difference that needs no reason.
    """

    def is_rounding(value: float, our: float, their: float) -> bool:
        if their > FAR_FROM_FLOAT64:
            return False
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

    far = {
        each.name: each.value
        for each in (*theirs.gradients, *theirs.state)
        if each.value > FAR_FROM_FLOAT64
    }
    if theirs.loss_difference > FAR_FROM_FLOAT64:
        far["the loss"] = theirs.loss_difference
    return found._replace(
        not_judged="PyTorch's own float32 is further from it than rounding explains: "
        + ", ".join(f"{name} by {value:.2g}" for name, value in list(far.items())[:_FEW])
        if far
        else "",
        gradients=marked(found.gradients, ours.gradients, theirs.gradients),
        state=marked(found.state, ours.state, theirs.state),
        loss_is_rounding=is_rounding(
            found.loss_difference, ours.loss_difference, theirs.loss_difference
        ),
    )


def _differences(
    ours: Tensors, theirs: Tensors, least: float, scale: float = 1.0
) -> tuple[Difference, ...]:
    """Return the differences of all tensors, the largest first; None counts as zeros.

    least: a tensor that is tiny beside all others is compared with this norm, not with its own.
    """
    found = []
    for name in ours:
        our, their = _without_equal_nans(ours[name], theirs[name])
        reference_norm = _norm(their)
        apart = _norm(our if their is None else their if our is None else exact(our) - exact(their))
        value = apart / (max(reference_norm, least) or math.ulp(0.0)) if apart else 0.0
        found.append(
            Difference(name, _or_infinite(value), _norm(our) / scale, reference_norm / scale)
        )
    return tuple(sorted(found, key=lambda difference: -difference.value))


def _without_equal_nans(
    our: torch.Tensor | None, their: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return both with 0 for what is not finite, if the same elements of both are not."""
    if our is None or their is None or not torch.equal(our.isfinite(), their.isfinite()):
        return our, their
    return our.nan_to_num(0.0, 0.0, 0.0), their.nan_to_num(0.0, 0.0, 0.0)


def _norm_of_all(tensors: Tensors) -> float:
    return math.hypot(*filter(math.isfinite, map(_norm, tensors.values())))


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(exact(tensor)))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relative(our: float, their: float) -> float:
    """Return the relative difference of two losses."""
    return _or_infinite(abs(our - their) / max(abs(their), LEAST_LOSS))


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf

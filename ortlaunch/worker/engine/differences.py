"""Differences between two passes in loss, gradients and state, and which of them are rounding.

The tolerances are in the table of precisions. This module is independent of models and engines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from ortlaunch.tables.precisions import Precision

NamedTensors = Mapping[str, "torch.Tensor | None"]
# A loss near zero has no useful relative difference. Losses of training are of order one.
LEAST_LOSS = 1e-3


ROUNDING = 10
"""The largest ratio of the engine's error to PyTorch's error that counts as rounding in fp32.

Both errors are distances from float64.
"""
# Names in a message.
_MAX_NAMED = 3
ROUNDING_CAP = 10
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


class EvaluationLosses(NamedTuple):
    """The losses of an evaluation pass."""

    engine: float
    reference: float
    """Of plain PyTorch."""


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
    evaluation: EvaluationLosses | None = None
    """Of an evaluation pass, if one was compared."""

    @property
    def reference_norm(self) -> float:
        """The norm of all gradients of the reference."""
        return math.hypot(*(difference.reference_norm for difference in self.gradients))

    @property
    def gradient_difference(self) -> float:
        """The largest difference of a gradient; rounding does not count."""
        return _largest_difference_besides_rounding(self.gradients)

    @property
    def state_difference(self) -> float:
        """The largest difference of a weight or buffer that a pass changed, without rounding."""
        return _largest_difference_besides_rounding(self.state)

    @property
    def rounding(self) -> list[str]:
        """The names of differences that are above the tolerance and are rounding, by float64."""
        names = [
            difference.name for difference in (*self.gradients, *self.state) if difference.rounding
        ]
        return [*(["loss"] if self.loss_is_rounding else []), *names]

    @property
    def evaluation_difference(self) -> float:
        """The relative difference of the loss in evaluation; 0 if it was not compared."""
        losses = self.evaluation
        return (
            0.0
            if losses is None or repr(losses.engine) == repr(losses.reference)
            else _relative_loss_difference(losses.engine, losses.reference)
        )

    @property
    def largest_difference(self) -> float:
        """The largest difference of loss, gradients and state, to be compared with a tolerance."""
        return max(0.0 if self.loss_is_rounding else self.loss_difference, self.gradient_difference,
                   self.state_difference, self.evaluation_difference)  # fmt: skip


def _largest_difference_besides_rounding(differences: Sequence[Difference]) -> float:
    return max(
        (difference.value for difference in differences if not difference.rounding), default=0.0
    )


class PassResult(NamedTuple):
    """The results of a forward and backward pass."""

    loss: float
    gradients: NamedTensors
    state: dict[str, torch.Tensor]
    """The changes of weights and buffers by the pass; only of those that it changed."""

    def select_gradients(self, parameter_names: Collection[str]) -> PassResult:
        """Return the pass with some of its gradients."""
        return self._replace(gradients={name: self.gradients[name] for name in parameter_names})


def loss_gradient_and_state_differences(
    engine_pass: PassResult,
    reference_pass: PassResult,
    precision_limits: Precision,
    norm_of_all_gradients: float | None = None,
) -> Comparison:
    """Return the differences between two passes.

    Args:
        engine_pass: the engine's pass.
        reference_pass: the reference's pass.
        precision_limits: the precision of both.
        norm_of_all_gradients: of all gradients of the model; None: `reference_pass` has all of them.
    """
    # repr, because nan is not equal to itself.
    if repr(engine_pass.loss) == repr(reference_pass.loss) and not math.isfinite(engine_pass.loss):
        reason = f"the loss is {engine_pass.loss} in plain PyTorch, too"
        return Comparison(engine_pass.loss, reference_pass.loss, 0.0, (), not_judged=reason)
    loss_difference = _relative_loss_difference(engine_pass.loss, reference_pass.loss)
    if norm_of_all_gradients is None:
        norm_of_all_gradients = _norm_of_all(reference_pass.gradients) / precision_limits.scale
    least_norm = precision_limits.floor * norm_of_all_gradients * precision_limits.scale
    gradients = _sorted_relative_differences(
        engine_pass.gradients, reference_pass.gradients, least_norm, precision_limits.scale
    )
    least_norm = precision_limits.floor * _norm_of_all(reference_pass.state)
    changed_names = sorted({*engine_pass.state, *reference_pass.state})
    engine_state, reference_state = (
        {name: compared_pass.state.get(name) for name in changed_names}
        for compared_pass in (engine_pass, reference_pass)
    )
    state = _sorted_relative_differences(engine_state, reference_state, least_norm)
    return Comparison(engine_pass.loss, reference_pass.loss, loss_difference, gradients, state)


def mark_differences_that_are_rounding(
    comparison: Comparison,
    engine_to_float64: Comparison,
    reference_to_float64: Comparison,
    tolerance: float,
) -> Comparison:
    """Return `comparison` with its rounding marked, or with the reason why float64 cannot judge it.

    Args:
        comparison: the engine's differences from PyTorch.
        engine_to_float64: the engine's differences from float64.
        reference_to_float64: PyTorch's differences from float64.
        tolerance: the largest difference that needs no reason.
    """

    def is_rounding(value: float, engine_error: float, reference_error: float) -> bool:
        if reference_error > FAR_FROM_FLOAT64:
            return False
        near = value <= ROUNDING_CAP * tolerance and engine_error <= ROUNDING * reference_error
        return value > tolerance and (engine_error <= tolerance or near)

    def mark_rounding(
        differences: Sequence[Difference], *distances_from_float64: Sequence[Difference]
    ) -> tuple[Difference, ...]:
        engine_errors, reference_errors = (
            {difference.name: difference.value for difference in distances}
            for distances in distances_from_float64
        )
        marked = [
            difference._replace(
                rounding=is_rounding(
                    difference.value,
                    engine_errors.get(difference.name, math.inf),
                    reference_errors.get(difference.name, 0.0),
                )
            )
            for difference in differences
        ]
        return tuple(
            sorted(marked, key=lambda difference: (difference.rounding, -difference.value))
        )

    far = {
        difference.name: difference.value
        for difference in (*reference_to_float64.gradients, *reference_to_float64.state)
        if difference.value > FAR_FROM_FLOAT64
    }
    if reference_to_float64.loss_difference > FAR_FROM_FLOAT64:
        far["the loss"] = reference_to_float64.loss_difference
    return comparison._replace(
        not_judged="PyTorch's own float32 is further from it than rounding explains: "
        + ", ".join(f"{name} by {value:.2g}" for name, value in list(far.items())[:_MAX_NAMED])
        if far
        else "",
        gradients=mark_rounding(
            comparison.gradients, engine_to_float64.gradients, reference_to_float64.gradients
        ),
        state=mark_rounding(comparison.state, engine_to_float64.state, reference_to_float64.state),
        loss_is_rounding=is_rounding(
            comparison.loss_difference,
            engine_to_float64.loss_difference,
            reference_to_float64.loss_difference,
        ),
    )


def _sorted_relative_differences(
    engine_tensors: NamedTensors,
    reference_tensors: NamedTensors,
    least_norm: float,
    loss_scale: float = 1.0,
) -> tuple[Difference, ...]:
    """Return the differences of all tensors, the largest first; None counts as zeros.

    least_norm: a tensor that is tiny beside all others is compared with this norm, not with its own.
    """
    differences = []
    for name in engine_tensors:
        engine_tensor, reference_tensor = engine_tensors[name], reference_tensors[name]
        if (
            engine_tensor is not None
            and reference_tensor is not None
            and torch.equal(engine_tensor.isfinite(), reference_tensor.isfinite())
        ):
            # What is not finite is the same in both.
            engine_tensor = engine_tensor.nan_to_num(0.0, 0.0, 0.0)
            reference_tensor = reference_tensor.nan_to_num(0.0, 0.0, 0.0)
        reference_norm = _float64_norm(reference_tensor)
        distance = _float64_norm(
            engine_tensor
            if reference_tensor is None
            else reference_tensor
            if engine_tensor is None
            else to_double_precision(engine_tensor) - to_double_precision(reference_tensor)
        )
        value = distance / (max(reference_norm, least_norm) or math.ulp(0.0)) if distance else 0.0
        differences.append(
            Difference(
                name,
                _infinite_if_not_finite(value),
                _float64_norm(engine_tensor) / loss_scale,
                reference_norm / loss_scale,
            )
        )
    return tuple(sorted(differences, key=lambda difference: -difference.value))


def _norm_of_all(tensors: NamedTensors) -> float:
    return math.hypot(*filter(math.isfinite, map(_float64_norm, tensors.values())))


def _float64_norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(to_double_precision(tensor)))


def to_double_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relative_loss_difference(engine_loss: float, reference_loss: float) -> float:
    """Return the relative difference of two losses."""
    return _infinite_if_not_finite(
        abs(engine_loss - reference_loss) / max(abs(reference_loss), LEAST_LOSS)
    )


def _infinite_if_not_finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf

"""CPU dropout for ORT's graphs: the torch operators `ortmodule::dropout` and its gradient.

ONNX Runtime draws one random number for each element, on one thread. torch's bernoulli takes the
same time on each of its threads. Here one 64-bit number from torch's generator serves four
elements. The module does not depend on ORTModule.
"""

from __future__ import annotations

import functools

import torch

FORWARD = "ortmodule::dropout"
BACKWARD = "ortmodule::dropout_backward"
# The drop probability is rounded to a multiple of 1 / 65,536, because an element has 16 random
# bits.
_PROBABILITY_STEPS = 1 << 16


@functools.cache
def define_cpu_dropout_operators_once() -> torch.library.Library:
    """Register the operators, once in a process.

    The operators exist for as long as the returned library.
    """
    library = torch.library.Library("ortmodule", "DEF")
    library.define("dropout(Tensor x, float p, bool train) -> (Tensor, Tensor)")
    library.define("dropout_backward(Tensor gradient, Tensor kept, float p, bool train) -> Tensor")
    library.impl("dropout", apply_dropout_and_get_kept_mask, "CPU")
    library.impl("dropout_backward", dropout_input_gradient, "CPU")
    return library


def apply_dropout_and_get_kept_mask(
    x: torch.Tensor, p: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x with dropout at probability p, and a uint8 mask with 1 for kept elements."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.uint8)
    # One int64 is viewed as four int16. The bounds of random_ cover all 64 bits, so each int16 is
    # uniform.
    numbers = (
        torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    )
    kept = (
        (numbers[: x.numel()] >= _count_of_dropping_16_bit_values(p) - _PROBABILITY_STEPS // 2)
        .view(torch.uint8)
        .view(x.shape)
    )
    return (x * kept).mul_(_scale_of_kept_elements(p)), kept


def dropout_input_gradient(
    gradient: torch.Tensor, kept: torch.Tensor, p: float, train: bool
) -> torch.Tensor:
    """Return the gradient of dropout's input, from the gradient of its output."""
    return (gradient * kept).mul_(_scale_of_kept_elements(p)) if train else gradient.clone()


def _count_of_dropping_16_bit_values(drop_probability: float) -> int:
    """Return how many of the 65,536 values of 16 bits drop an element.

    The result is at most 65,535, so that `_scale_of_kept_elements` does not divide by zero. For p = 1 the scale is
    0, so the output is all zeros, as in torch.
    """
    return min(round(drop_probability * _PROBABILITY_STEPS), _PROBABILITY_STEPS - 1)


def _scale_of_kept_elements(drop_probability: float) -> float:
    """Return the factor for the kept elements.

    The factor uses the probability after rounding, so the expected value stays that of the input.
    """
    return (
        _PROBABILITY_STEPS
        / (_PROBABILITY_STEPS - _count_of_dropping_16_bit_values(drop_probability))
        if drop_probability < 1
        else 0.0
    )

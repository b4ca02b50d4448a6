"""Operators for ORT's graphs: ORT cannot call torch's own operators for this work.

GELU in its tanh form (torch's operator takes the form's name, and ORT passes no text); the gradient
of torch.gather (torch has no operator for it); the gradients of a convolution and of a GroupNorm
(some of their results may be missing). All but the last are for CPUs, where ONNX Runtime's own
kernels are slower: docs/evidence/measuring.md. The module does not depend on ORTModule.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

GELU = "ortmodule::gelu_tanh"
GELU_BACKWARD = "ortmodule::gelu_tanh_backward"
GATHER_BACKWARD = "ortmodule::gather_backward"
CONVOLUTION_BACKWARD = "ortmodule::convolution_backward"
GROUP_NORM_BACKWARD = "ortmodule::group_norm_backward"


@functools.cache
def define_gelu_gather_conv_norm_operators_once() -> torch.library.Library:
    """Register the operators, once in a process.

    The operators exist for as long as the returned library.
    """
    library = torch.library.Library("ortmodule", "FRAGMENT")
    for name, schema, function in (
        (
            "gelu_tanh",
            "(Tensor x) -> Tensor",
            functools.partial(torch.ops.aten.gelu, approximate="tanh"),
        ),
        (
            "gelu_tanh_backward",
            "(Tensor gradient, Tensor x) -> Tensor",
            functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
        ),
        (
            "gather_backward",
            "(Tensor gradient, int[] shape, Tensor index, int dim) -> Tensor",
            gather_input_gradient,
        ),
        (
            "convolution_backward",
            "(Tensor gradient, Tensor x, Tensor weight, int[] stride, int[] padding, "
            "int[] dilation, int groups, int wanted) -> (Tensor, Tensor, Tensor)",
            convolution_gradients_with_empty_for_unwanted,
        ),
    ):
        library.define(name + schema)
        library.impl(name, function, "CPU")
    library.define(
        "group_norm_backward(Tensor gradient, Tensor x, Tensor mean, Tensor inverse, Tensor? weight, "
        "int samples, int channels, int positions, int groups) -> (Tensor, Tensor, Tensor)"
    )
    library.impl(
        "group_norm_backward",
        group_norm_gradients_with_empty_if_unweighted,
        "CompositeExplicitAutograd",
    )
    return library


def gather_input_gradient(gradient: Tensor, shape: list[int], index: Tensor, dim: int) -> Tensor:
    """Return the gradient of x, of the given shape, in torch.gather(x, dim, index)."""
    return gradient.new_zeros(shape).scatter_add_(dim, index, gradient)


def convolution_gradients_with_empty_for_unwanted(
    gradient: Tensor, x: Tensor, weight: Tensor, *other_arguments: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias in a convolution.

    The last of the other arguments, `wanted_bits`, has bit 0, 1 or 2 where the gradient of x, weight or
    bias is wanted; the others are empty.
    """
    stride, padding, dilation, groups, wanted_bits = other_arguments
    results = torch.ops.aten.convolution_backward(
        gradient, x, weight, [weight.shape[0]], stride, padding, dilation, False,
        [0] * len(stride), groups, [bool(wanted_bits >> bit_index & 1) for bit_index in range(3)],
    )  # fmt: skip
    return tuple(gradient.new_empty(0) if result is None else result for result in results)


def group_norm_gradients_with_empty_if_unweighted(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *sizes: int
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias in a GroupNorm; without weights, two are empty."""
    output_mask = [True, weight is not None, weight is not None]
    results = torch.ops.aten.native_group_norm_backward(
        gradient, x, mean, inverse, weight, *sizes, output_mask
    )
    return tuple(gradient.new_empty(0) if result is None else result for result in results)

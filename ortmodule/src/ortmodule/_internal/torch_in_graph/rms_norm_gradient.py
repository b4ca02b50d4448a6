"""The gradient of RMSNorm on CPUs for ORT's graphs: `ortmodule::rms_norm_backward`.

ONNX Runtime computes it on one thread. The module does not depend on ORTModule.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BACKWARD = "ortmodule::rms_norm_backward"


@functools.cache
def define_rms_norm_backward_on_cpu_once() -> torch.library.Library:
    """Register the operator, once in a process.

    The operator exists for as long as the returned library.
    """
    library = torch.library.Library("ortmodule", "FRAGMENT")
    library.define(
        "rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor inverse)"
        " -> (Tensor, Tensor)"
    )
    library.impl("rms_norm_backward", rms_norm_input_and_scale_gradients, "CPU")
    return library


def rms_norm_input_and_scale_gradients(
    gradient: Tensor, x: Tensor, scale: Tensor, inverse_root_mean_square: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and scale of x * inverse * scale, over the last dimension.

    Args:
        gradient: the gradient of the result, of x's shape.
        x: of shape (..., size).
        scale: of shape (size,).
        inverse_root_mean_square: the inverse of the root mean square of x, of shape (..., 1).
    """
    size = x.shape[-1]
    # With means of 0 the gradient of LayerNorm, which torch has as one kernel, differs from that
    # of RMSNorm only by a term: the mean of gradient * scale, which LayerNorm subtracts.
    x_gradient, scale_gradient, _ = torch.ops.aten.native_layer_norm_backward(
        gradient,
        x,
        [size],
        torch.zeros_like(inverse_root_mean_square),
        inverse_root_mean_square,
        scale,
        None,
        [True, True, False],
    )
    mean = (gradient @ scale).unsqueeze(-1).mul_(inverse_root_mean_square).div_(size)
    return x_gradient.add_(mean), scale_gradient

"""GELU by its tanh form on CPUs for ORT's graphs: `ortlaunch::gelu_tanh` and its gradient.

ONNX Runtime computes the gradient on one thread. torch's own operator takes the form's name, and
ORT can pass no text to an operator. The module does not depend on ORTModule.
"""

from __future__ import annotations

import functools

import torch

FORWARD = "ortlaunch::gelu_tanh"
BACKWARD = "ortlaunch::gelu_tanh_backward"


@functools.cache
def define_operators() -> torch.library.Library:
    """Register the operators, once in a process.

    The operators exist for as long as the returned library.
    """
    library = torch.library.Library("ortlaunch", "FRAGMENT")
    library.define("gelu_tanh(Tensor x) -> Tensor")
    library.define("gelu_tanh_backward(Tensor gradient, Tensor x) -> Tensor")
    library.impl("gelu_tanh", functools.partial(torch.ops.aten.gelu, approximate="tanh"), "CPU")
    backward = functools.partial(torch.ops.aten.gelu_backward, approximate="tanh")
    library.impl("gelu_tanh_backward", backward, "CPU")
    return library

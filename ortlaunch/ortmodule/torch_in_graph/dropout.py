"""Dropout for graphs on the CPU: operators of torch's, `ortlaunch::dropout` and its gradient, that a graph can call.

ONNX Runtime draws a number of its own for every element, on one thread; torch's bernoulli takes as long on each of its
threads. Here one number of 64 bits is drawn for four elements, from torch's generator. Knows nothing of ORTModule.
"""

from __future__ import annotations

import functools

import torch

FORWARD = "ortlaunch::dropout"
BACKWARD = "ortlaunch::dropout_backward"
_STEPS = 1 << 16  # a share is a whole number of these: 16 bits an element


@functools.cache
def define_operators() -> torch.library.Library:
    """Once a process; the library lives as long as what is returned."""
    library = torch.library.Library("ortlaunch", "DEF")
    library.define("dropout(Tensor x, float p, bool train) -> (Tensor, Tensor)")
    library.define("dropout_backward(Tensor gradient, Tensor kept, float p, bool train) -> Tensor")
    library.impl("dropout", dropout, "CPU")
    library.impl("dropout_backward", dropout_backward, "CPU")
    return library


def dropout(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(x with a share p of its elements dropped and the others scaled up, 1 where an element is kept as uint8)."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.uint8)
    numbers = (
        torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    )
    kept = (numbers[: x.numel()] >= _dropped(p) - _STEPS // 2).view(torch.uint8).view(x.shape)
    return (x * kept).mul_(_scale(p)), kept


def dropout_backward(
    gradient: torch.Tensor, kept: torch.Tensor, p: float, train: bool
) -> torch.Tensor:
    """The gradient of what went in, from that of what came out."""
    return (gradient * kept).mul_(_scale(p)) if train else gradient.clone()


def _dropped(p: float) -> int:
    """Of 65,536 elements; never all, so that there is a scale (for p = 1 it is 0: all zeros, as torch gives)."""
    return min(round(p * _STEPS), _STEPS - 1)


def _scale(p: float) -> float:
    """Of what is kept, after the share that is dropped in fact: the mean stays what it was."""
    return _STEPS / (_STEPS - _dropped(p)) if p < 1 else 0.0

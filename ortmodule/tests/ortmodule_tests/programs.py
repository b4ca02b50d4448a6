"""Run one training program on eager PyTorch and on ORTModule, and compare every value."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, Settings

Values = Mapping[str, Any]
Program = Callable[[Any, nn.Module], Values | None]
"""A function `program(wrapped, model)` that trains or evaluates `wrapped`.

It returns named losses and outputs. `model` is the inner module; in eager PyTorch both are the same
object.
"""
TOLERANCE = 2e-5
"""The largest difference, relative to the norm of each value."""


def run(
    program: Program, model: nn.Module, on_ort: bool, seed: int = 0, **settings: Any
) -> dict[str, Any]:
    """Run the program on a copy of `model`; return its values, gradients, weights and buffers."""
    # A copy, because eager and ORT must start from the same weights.
    model = copy.deepcopy(model)
    wrapped = ORTModule(model, Settings(**{"threads": 1, **settings})) if on_ort else model
    # After the wrapper is made, so that both programs draw the same numbers.
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {name: _detached(value) for name, value in (program(wrapped, model) or {}).items()}
    for name, parameter in model.named_parameters():
        values[f"weight {name}"] = _detached(parameter)
        values[f"gradient {name}"] = _detached(parameter.grad)
    values.update((f"buffer {name}", _detached(buffer)) for name, buffer in model.named_buffers())
    return values


def compare(
    program: Program, model: nn.Module, tolerance: float = TOLERANCE, seed: int = 0, **settings: Any
) -> None:
    """Fail unless every value of the program on ORTModule equals eager PyTorch's."""
    expected = run(program, model, False, seed)
    values = run(program, model, True, seed, **settings)
    assert values.keys() == expected.keys()
    wrong = [
        text
        for name in expected
        if (text := _difference(expected[name], values[name], tolerance, name))
    ]
    assert not wrong, "\n".join(wrong)


def refuse(
    program: Program,
    model: nn.Module,
    message: str,
    error: type[Exception] = Exception,
    **settings: Any,
) -> None:
    """Fail unless ORTModule ends the program with `message`; eager must run it.

    Args:
        program: the program.
        model: the model; it is copied.
        message: a regular expression for the error.
        error: the error's class.
    """
    # Eager must run the program: otherwise the error could be the program's own.
    run(program, model, False)
    with pytest.raises(error, match=message):
        run(program, model, True, **settings)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _difference(expected: Any, value: Any, tolerance: float, name: str) -> str:
    """Return a description of the difference; empty if there is none."""
    if expected is None or value is None or not isinstance(expected, (torch.Tensor, float)):
        same = value is expected or (None not in (expected, value) and bool(value == expected))
        return "" if same else f"{name}: eager {expected}, ort {value}"
    one, other = (torch.as_tensor(each).to(torch.float64) for each in (expected, value))
    if one.shape != other.shape:
        return f"{name}: eager has the shape {tuple(one.shape)}, ort {tuple(other.shape)}"
    error = (other - one).norm().item()
    # Not `error > ...`, which is false for nan. The constant is for values whose norm is zero.
    return (
        ""
        if error <= tolerance * one.norm().item() + 1e-7
        else f"{name}: eager {expected}, ort {value}"
    )

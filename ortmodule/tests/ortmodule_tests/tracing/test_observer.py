"""The one observer of a trace: which handlers get a call, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ortmodule
from ortmodule._internal.base.trace_facts import TraceFacts
from ortmodule._internal.tracing.observer import (
    HandlerOrder,
    facts_of_observed_trace_or_none,
    handle_calls_of_trace,
    observe_trace,
)


def test_calls_of_a_handler_pass_the_later_ones_alone() -> None:
    """Handlers run in their order, whichever begins first; the last one's own calls pass none."""
    names: list[str] = []

    def aliases(func: Any, args: Any, kwargs: Any) -> object:
        names.append(f"aliases {func.__name__}")
        args[0].neg()
        return func(*args, **kwargs)

    def values(func: Any, args: Any, kwargs: Any) -> object:
        names.append(f"values {func.__name__}")
        torch.ones(1).abs()
        return func(*args, **kwargs)

    x = torch.ones(2)
    with observe_trace(facts := TraceFacts()):
        with handle_calls_of_trace(HandlerOrder.ALIASES, aliases) as handed:
            with handle_calls_of_trace(HandlerOrder.PYTHON_VALUES, values):
                torch.exp(x)
            torch.sin(x)
        torch.cos(x)
        assert handed is facts is facts_of_observed_trace_or_none()
    assert facts_of_observed_trace_or_none() is None
    assert names == ["aliases exp", "values neg", "values exp", "aliases sin"]


def test_an_error_of_a_handler_leaves_the_observer_whole() -> None:
    """After an error in an inner handler, the next call passes all handlers again."""
    passed: list[HandlerOrder] = []

    def refuse_first(func: Any, args: Any, kwargs: Any) -> object:
        passed.append(HandlerOrder.PYTHON_VALUES)
        if len(passed) == 2:
            raise ValueError("the first call")
        return func(*args, **kwargs)

    def record(func: Any, args: Any, kwargs: Any) -> object:
        passed.append(HandlerOrder.GRAD_MODE)
        return func(*args, **kwargs)

    x = torch.ones(2)
    with (
        observe_trace(TraceFacts()),
        handle_calls_of_trace(HandlerOrder.PYTHON_VALUES, refuse_first),
        handle_calls_of_trace(HandlerOrder.GRAD_MODE, record),
    ):
        with pytest.raises(ValueError, match="the first call"):
            torch.exp(x)
        torch.exp(x)
    assert passed == 2 * [HandlerOrder.GRAD_MODE, HandlerOrder.PYTHON_VALUES]


def test_the_observer_is_the_only_function_mode() -> None:
    """No other module of the package defines a mode that sees the calls of torch."""
    texts = {path.name: path.read_text() for path in Path(ortmodule.__file__).parent.rglob("*.py")}
    for mode, owner in (
        ("(TorchFunctionMode)", "observer.py"),
        ("(TorchDispatchMode)", "weight_changes.py"),
    ):
        assert [name for name, text in texts.items() if mode in text] == [owner]

"""The one observer of a trace: a function mode that gives each call of torch to its handlers.

A handler runs the call, and may run others before or after it. The later handlers get all of these
calls, and so track what an earlier one computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Args, Kwargs
    from ortmodule._internal.base.trace_facts import TraceFacts

CallHandler = Callable[["AnyFunction", "Args", "Kwargs"], object]
"""Takes a function of torch with its arguments, calls it, and returns its result."""


class HandlerOrder(IntEnum):
    """The order of the handlers of a call. The first two handle calls of torch's export alone."""

    ALIASES = 0
    """Recomputes tensors after changes of memory that they share."""
    GRAD_MODE = 1
    """Detaches what the model or an earlier handler computes without gradients."""
    WEIGHT_CHANGES = 2
    """Refuses `weight.data = ...`."""
    PYTHON_VALUES = 3
    """Records what depends on values, and the lines that read values in Python."""


class _TraceObserver(TorchFunctionMode):
    def __init__(self, trace_facts: TraceFacts) -> None:
        self.facts = trace_facts
        # In their order; while a handler runs, those that its own calls still pass.
        self.subscriptions: tuple[tuple[HandlerOrder, CallHandler], ...] = ()

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        subscriptions = self.subscriptions
        if not subscriptions:
            return func(*args, **(kwargs or {}))
        handler = subscriptions[0][1]
        # torch calls this method with the mode off, so that the last handler's calls pass none.
        if len(subscriptions) == 1:
            return handler(func, args, kwargs or {})
        self.subscriptions = subscriptions[1:]
        torch._C._push_on_torch_function_stack(self)
        try:
            return handler(func, args, kwargs or {})
        finally:
            torch._C._pop_torch_function_stack()
            self.subscriptions = subscriptions


_open_observer: ContextVar[_TraceObserver] = ContextVar("open_observer")


@contextlib.contextmanager
def observe_trace(trace_facts: TraceFacts) -> Iterator[None]:
    """Observe the calls of torch in an export: its plain pass and its trace."""
    token = _open_observer.set(_TraceObserver(trace_facts))
    try:
        with _open_observer.get():
            yield
    finally:
        _open_observer.reset(token)


@contextlib.contextmanager
def handle_calls_of_trace(order: HandlerOrder, call_handler: CallHandler) -> Iterator[TraceFacts]:
    """Give the calls of the observed trace to a handler, inside a with-block; yield its facts."""
    observer = _open_observer.get()
    outer_subscriptions = observer.subscriptions
    observer.subscriptions = tuple(sorted((*outer_subscriptions, (order, call_handler))))
    try:
        yield observer.facts
    finally:
        observer.subscriptions = outer_subscriptions


def facts_of_observed_trace_or_none() -> TraceFacts | None:
    """Return the facts of the trace that is observed now; None outside of an export."""
    observer = _open_observer.get(None)
    return observer.facts if observer else None

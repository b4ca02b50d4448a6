"""How a function of another package is changed in this process, and the record of every such repair.

What is repaired, and why, is compat.py's and repairs.py's. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

_applied: list[str] = []
_not_applied: dict[str, str] = {}


def applied() -> tuple[str, ...]:
    """Names of the repairs in force, in the order they were applied; empty before `import_ortmodule`."""
    return tuple(_applied)


def record(*names: str) -> None:
    """Add repairs to `applied`."""
    _applied.extend(name for name in names if name not in _applied)


def not_applied() -> dict[str, str]:
    """Repairs that were not made, with the reason."""
    return dict(_not_applied)


def leave_out(name: str, why: str) -> None:
    """Add a repair to `not_applied`."""
    _not_applied[name] = why


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the length of a with-block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wrap_method(owner: Any, method: str, around: Callable[..., Any]) -> None:
    """Let `around(original, *args, **kwargs)` stand in for a method of a class."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, method, wrapped)


def wrap_ort_export(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `torch.onnx.export` as ORT's only caller of it sees it; everybody else's stays as it is."""
    caller: Any = importlib.import_module("onnxruntime.training.ortmodule._graph_transition_manager")
    onnx = caller.torch.onnx
    caller.torch = Seen(caller.torch, onnx=Seen(onnx, export=wrapper(onnx.export)))


class Seen:
    """A module as one module of ORT's sees it: the same names, some of them replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

"""Ways to change functions of other packages, and environment variables, in this process.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the length of a with-block, and restore them afterwards."""
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


@contextlib.contextmanager
def without_package(name: str) -> Iterator[None]:
    """Let imports of an optional package fail inside a with-block, unless it is loaded already."""
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def wrap_method(owner: object, method: str, around: AnyFunction) -> None:
    """Replace a method of a class, or a function of a module.

    Calls go to `around(original, *args, **kwargs)`.
    """
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        return around(original, *args, **kwargs)

    setattr(owner, method, wrapped)


def replace_ort_export(export: AnyFunction) -> None:
    """Let ORT call `export` instead of `torch.onnx.export`. Other callers still get torch's own."""
    caller: Any = importlib.import_module(
        "onnxruntime.training.ortmodule._graph_transition_manager"
    )
    # Only this module of ORT exports. It finds `torch.onnx.export` through its global `torch`,
    # replaced here.
    caller.torch = ModuleView(caller.torch, onnx=ModuleView(caller.torch.onnx, export=export))


class ModuleView:
    """A stand-in for a module, given to one importing module: the same names, some replaced."""

    def __init__(self, module: object, **replaced: object) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

"""How a function of another package is changed in this process. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction


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


def wrap_method(owner: object, method: str, around: AnyFunction) -> None:
    """Let `around(original, *args, **kwargs)` stand in for a method of a class."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        return around(original, *args, **kwargs)

    setattr(owner, method, wrapped)


def replace_ort_export(export: AnyFunction) -> None:
    """Let `export` be `torch.onnx.export` for ORT, its only caller here; everybody else's stays as it is."""
    caller: Any = importlib.import_module(
        "onnxruntime.training.ortmodule._graph_transition_manager"
    )
    caller.torch = ModuleView(caller.torch, onnx=ModuleView(caller.torch.onnx, export=export))


class ModuleView:
    """A module as one module of ORT's sees it: the same names, some of them replaced."""

    def __init__(self, module: object, **replaced: object) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

"""Samples that the user's own `module:function` makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ortlaunch.worker.data.reading import DataError


def call(key: str, target: str, arguments: dict[str, Any]) -> Any:
    """What the user's own `module:function` returns.

    Raises:
        DataError: there is no such module or function, or it takes other arguments.
    """
    module, _, function = target.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise DataError(f"{key}: no module {module!r} beside the recipe, in this folder or installed") from None
        raise
    if not callable(found):
        raise DataError(f"{key}: module {module!r} has no function {function!r}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise DataError(f"{key}: {target}{inspect.signature(found)} and its `arguments` differ: {error}") from None
    return found(**arguments)


class OwnSamples:
    """The user's own data set: any object with `__len__` and `__getitem__`."""

    def __init__(self, items: Any) -> None:
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or len(items) == 0:
            raise DataError(
                f"data.factory returned {type(items).__name__}; it must have samples, __len__ and __getitem__"
            )
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        item = self.items[index]
        if not isinstance(item, Mapping):
            raise DataError(
                f"sample {index} of data.factory is a {type(item).__name__}; it must be a mapping of names to tensors"
            )
        return item

"""Ways to change functions of other packages, and environment variables, in this process.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def set_environment_variables_temporarily(**value_by_name: str) -> Iterator[None]:
    """Set environment variables for the length of a with-block, and restore them afterwards."""
    previous_values = {name: os.environ.get(name) for name in value_by_name}
    os.environ.update(value_by_name)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def hide_package_unless_loaded(package_name: str) -> Iterator[None]:
    """Let imports of an optional package fail inside a with-block, unless it is loaded already."""
    is_hidden = package_name not in sys.modules
    if is_hidden:
        sys.modules[package_name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[package_name]


@contextlib.contextmanager
def replace_attribute_temporarily(
    attribute_owner: object, attribute_name: str, value: object
) -> Iterator[None]:
    """Give an object, class or module another attribute for the length of a with-block.

    An attribute that the owner only inherits is inherited again afterwards.
    """
    missing = object()
    previous_value = vars(attribute_owner).get(attribute_name, missing)
    setattr(attribute_owner, attribute_name, value)
    try:
        yield
    finally:
        if previous_value is missing:
            delattr(attribute_owner, attribute_name)
        else:
            setattr(attribute_owner, attribute_name, previous_value)


class ModuleView:
    """A stand-in for a module, given to one importing module: the same names, some replaced."""

    def __init__(self, original_module: object, **replacements: object) -> None:
        self.__dict__.update(replacements)
        self._module = original_module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

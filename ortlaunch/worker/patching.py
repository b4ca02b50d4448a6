"""Ways to change other packages in this process for the length of a with-block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


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

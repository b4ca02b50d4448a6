"""Types of calls that are passed on to a function of another package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AnyFunction = Callable[..., Any]
"""A function of another package, called with the arguments of its caller."""
Args = tuple[Any, ...]
"""Positional arguments of such a function."""
Kwargs = dict[str, Any]
"""Keyword arguments of such a function."""

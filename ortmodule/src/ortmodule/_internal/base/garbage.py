"""Garbage collections in an export, which visit only the objects of that export.

A collection of all objects takes 0.3 s once the libraries are loaded.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def keep_new_objects_apart_from_libraries() -> Iterator[None]:
    """Collect no garbage by itself in this block, so that its objects stay in the young generations."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_new_objects() -> None:
    """Collect garbage among the objects of this export."""
    # Those that an earlier call has visited are in the second generation.
    gc.collect(1)

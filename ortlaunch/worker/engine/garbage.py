"""Thresholds of Python's garbage collector: high while libraries load, usual afterwards.

A full collection visits all objects that are not excluded. An eighth of the start-up time went into
collections that freed almost nothing.
"""

from __future__ import annotations

import gc

_USUAL_THRESHOLDS = gc.get_threshold()
# Objects between two collections.
_RARE_THRESHOLD = 50_000


def raise_garbage_threshold() -> None:
    """Collect garbage rarely until `collect_freeze_and_restore_threshold` is called."""
    gc.set_threshold(_RARE_THRESHOLD)


def exclude_libraries_from_collections() -> None:
    """Exclude the objects of the libraries loaded so far; they live until the end."""
    gc.freeze()


def collect_freeze_and_restore_threshold() -> None:
    """Collect once, then restore the usual threshold and exclude all present objects."""
    gc.collect()
    # The session lives until the end: no collection needs to visit it again.
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)

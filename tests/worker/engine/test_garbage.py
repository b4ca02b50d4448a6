"""Garbage collection around the start of a rank."""

from __future__ import annotations

import gc
import weakref

from ortlaunch.worker.engine.garbage import (
    collect_freeze_and_restore_threshold,
    exclude_libraries_from_collections,
    raise_garbage_threshold,
)


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_of_the_start_is_collected_and_what_stays_is_left_out() -> None:
    """After the start, collections are as frequent as usual and visit new objects only."""
    usual = gc.get_threshold()
    try:
        raise_garbage_threshold()
        assert gc.get_threshold()[0] > 10 * usual[0]
        library = Cycle()
        exclude_libraries_from_collections()
        assert not any(one is library for one in gc.get_objects())
        gone = weakref.ref(Cycle())
        stays = Cycle()
        collect_freeze_and_restore_threshold()
        assert (gone(), gc.get_threshold()) == (None, usual)
        later = weakref.ref(Cycle())
        # The collector does not list objects that were frozen.
        assert not any(one is stays for one in gc.get_objects())
        gc.collect()
        assert later() is None
    finally:
        # Later tests need the usual threshold.
        gc.set_threshold(*usual)

"""Exports and compilations in mid-training, as phases of the pulse: they may take longer than any number of steps."""

from __future__ import annotations

import contextlib

from ortlaunch.worker.supervision.pulse import Pulse

EXPORTING = "exporting to ONNX Runtime"
COMPILING = "compiling"


def tell_rebuilding(used: str, pulse: Pulse) -> None:
    """From now on the pulse shows when engine `used` builds anew, as for a batch of another shape."""
    if used == "ort":
        from ortlaunch.ortmodule.base import counters

        counters.while_building = lambda: pulse.aside(EXPORTING)
    if used == "inductor":
        _tell_compiling(pulse)


def _tell_compiling(pulse: Pulse) -> None:
    from torch._dynamo.callback import on_compile_end, on_compile_start

    open_now = contextlib.ExitStack()

    def begin(*_: object) -> None:
        open_now.close()  # an older torch tells of inner compilations, too
        open_now.enter_context(pulse.aside(COMPILING))

    on_compile_start(begin)
    on_compile_end(lambda *_: open_now.close())

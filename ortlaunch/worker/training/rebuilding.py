"""Exports and compilations in mid-training, shown as phases of the pulse.

They may take longer than any number of steps.
"""

from __future__ import annotations

import contextlib

from ortlaunch.worker.supervision.pulse import Pulse

EXPORTING = "exporting to ONNX Runtime"
COMPILING = "compiling"


def report_rebuilding(used: str, pulse: Pulse) -> None:
    """Let the pulse show when engine `used` builds again, for example for another batch shape."""
    if used == "ort":
        # Imported late: the other engines do not need this module.
        from ortlaunch.ortmodule.base import counters

        counters.while_building = lambda: pulse.aside(EXPORTING)
    if used == "inductor":
        _report_compiling(pulse)


def _report_compiling(pulse: Pulse) -> None:
    # Imported late: only engine inductor needs torch._dynamo.
    from torch._dynamo.callback import on_compile_end, on_compile_start

    open_now = contextlib.ExitStack()

    def begin(*_: object) -> None:
        # An older torch calls this for nested compilations, too.
        open_now.close()
        open_now.enter_context(pulse.aside(COMPILING))

    on_compile_start(begin)
    on_compile_end(lambda *_: open_now.close())

"""Exports and compilations in mid-training, shown as phases of the pulse.

They may take longer than any number of steps.
"""

from __future__ import annotations

import contextlib

from ortlaunch.worker.supervision.pulse import SharedProgress

EXPORTING = "exporting to ONNX Runtime"
COMPILING = "compiling"


def register_progress_display_of_engine_rebuilds(
    engine_name: str, shared_progress: SharedProgress
) -> None:
    """Let the pulse show when engine `engine_name` builds again, for example for another batch shape."""
    if engine_name == "ort":
        # Imported late: the other engines do not need this module.
        from ortmodule.loops import watch_builds

        watch_builds(
            lambda: shared_progress.show_phase_until_end_without_counting_progress(EXPORTING)
        )
    if engine_name == "inductor":
        _register_compilation_callbacks(shared_progress)


def _register_compilation_callbacks(shared_progress: SharedProgress) -> None:
    # Imported late: only engine inductor needs torch._dynamo.
    from torch._dynamo.callback import on_compile_end, on_compile_start

    open_phase = contextlib.ExitStack()

    def show_compilation(*_: object) -> None:
        # An older torch calls this for nested compilations, too.
        open_phase.close()
        open_phase.enter_context(
            shared_progress.show_phase_until_end_without_counting_progress(COMPILING)
        )

    on_compile_start(show_compilation)
    on_compile_end(lambda *_: open_phase.close())

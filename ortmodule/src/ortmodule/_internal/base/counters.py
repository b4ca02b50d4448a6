"""Counts of this process's exports, and notes for the end of a run.

No code may make a decision by these values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from ortmodule._internal.base.json_types import Json


@dataclass
class ExportTally:
    """Counts of every ORTModule of this process.

    Unlike the passes that the witness counts, those of the engine's probe stay included.
    """

    exports: int = 0
    """Runs of torch.onnx.export."""
    re_exports: int = 0
    """Exports beyond the first for training and evaluation, because a call, mode or value changed."""
    export_seconds: float = 0.0
    """Seconds in those exports, including the passes of the model that they run."""
    label_density: float | None = None
    """Share of the labels in a batch that count, where the others are left out of the computation."""
    postprocess: Json | None = None
    """The user's function on the newest exported graph, with its nodes before and after."""
    # A list and not a set, so that notes are printed in the order in which they arose.
    notes: list[str] = field(default_factory=list)

    def add_end_note_once(self, note_text: str) -> None:
        """Add a note, once."""
        if note_text not in self.notes:
            self.notes.append(note_text)

    def counts_and_notes_record(self) -> Json:
        """Return the counts for engine.json."""
        # Milliseconds are exact enough for a file that people read.
        return {**asdict(self), "export_seconds": round(self.export_seconds, 3)}


tally = ExportTally()
_create_build_context: Callable[[], contextlib.AbstractContextManager[None]] = (
    contextlib.nullcontext
)


def watch_builds(create_context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Open a context whenever a graph is exported or derived, or its session is made.

    Such work takes longer than a step, which whoever supervises this process may want to know.
    """
    global _create_build_context  # noqa: PLW0603  # one for the process, as ORT's classes are
    _create_build_context = create_context


def while_building() -> contextlib.AbstractContextManager[None]:
    """Return the context of `watch_builds`."""
    return _create_build_context()

"""Counts of what this process exported, and notes for the end of a run. Must not decide anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from ortlaunch.json_types import Json


@dataclass
class Tally:
    """Counts of every ORTModule of this process; unlike the witness's passes, those of the engine's probe stay in."""

    exports: int = 0
    """Runs of torch.onnx.export."""
    re_exports: int = 0
    """Exports beyond a model's first ones for training and evaluation, because a call, mode or value had changed."""
    export_seconds: float = 0.0
    """Spent in those exports, with the passes of the model that they take."""
    label_density: float | None = None
    """Share of the labels that count in a batch, where the others are left out of the computation."""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def truth(self) -> Json:
        """For engine.json."""
        return {**asdict(self), "export_seconds": round(self.export_seconds, 3)}


tally = Tally()
while_building: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Open while a graph is exported, derived or made a session: for who watches over this process."""

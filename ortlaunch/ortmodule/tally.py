"""What this process exported to ONNX, how often and how long, and what a person should know of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts of every ORTModule of this process; unlike the witness's passes, those of the engine's probe stay in."""

    exports: int = 0
    """Runs of torch.onnx.export."""
    re_exports: int = 0
    """Graphs thrown away, because a call or what is frozen had changed."""
    export_seconds: float = 0.0
    """Spent in those exports, with the passes of the model that they take."""
    label_density: float | None = None
    """Share of the labels that count in a batch, where the others are left out of the computation."""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def truth(self) -> dict[str, Any]:
        """For engine.json."""
        return {**asdict(self), "export_seconds": round(self.export_seconds, 3)}


tally = Tally()

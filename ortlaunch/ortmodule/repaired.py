"""ORTModule's package, imported with every repair of its import and our way of exporting."""

from __future__ import annotations

import functools
from types import ModuleType

from ortlaunch.ortmodule.tracing import compat


@functools.cache
def import_ortmodule() -> ModuleType:
    """The module `onnxruntime.training.ortmodule`, repaired; the first call imports it, later calls return it.

    On torch 2.6 and older call it before transformers is imported: ORT replaces `torch.utils.checkpoint.checkpoint`
    when it is imported, and transformers keeps the one it saw (its gradient checkpointing then ends the export).
    Raises MissingDependency, with the command to type.
    """
    ortmodule = compat.import_with_repairs()
    from ortlaunch.ortmodule import pipeline  # some of its modules import ORT's

    pipeline.install()
    return ortmodule

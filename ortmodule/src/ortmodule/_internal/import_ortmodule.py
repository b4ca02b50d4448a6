"""The import of ORTModule's package with every repair and with this package's export."""

from __future__ import annotations

import functools
from types import ModuleType

from ortmodule._internal.tracing import import_repairs


@functools.cache
def import_ortmodule_with_repairs_and_export_steps() -> ModuleType:
    """Return the module `onnxruntime.training.ortmodule`, repaired; the first call imports it.

    With torch 2.6 and older, call it before transformers is imported. ORT replaces
    `torch.utils.checkpoint.checkpoint` at its import, and transformers keeps the function that it
    imported; its gradient checkpointing would then fail in the export.

    Raises:
        MissingDependency: a package or extension is missing; has the command to type.
    """
    ortmodule = import_repairs.import_ortmodule_with_repairs_once()
    # After the import, because some of its modules import ORT's.
    from ortmodule._internal import pipeline

    pipeline.install_export_steps_in_ort()
    return ortmodule

"""ONNX Runtime's other training API: graphs that train without Python, as on a device."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.tracing.checkpointing import restore_checkpoint_functions


def import_ort_training_artifacts() -> ModuleType:
    """Return the module onnxruntime.training.artifacts; ONNX Runtime logs errors alone from then on.

    Raises:
        MissingDependency: onnxruntime-training is not installed, or is of another release.
    """
    try:
        # Severity 3: errors alone are logged.
        import_module("onnxruntime").set_default_logger_severity(3)
        import_module("onnxruntime.training.api")
        return import_module("onnxruntime.training.artifacts")
    except ImportError as error:
        raise MissingDependency(
            f"onnxruntime-training is needed ({error})", 'pip install "ortmodule[cpu]"'
        ) from None
    # The import of ORTModule may fail silently within, and leave functions of torch and DeepSpeed
    # replaced.
    finally:
        restore_checkpoint_functions()

"""ONNX Runtime's ORTModule 1.19.2, repaired for current torch, for any training loop.

    from ortmodule import ORTModule

    model = ORTModule(model)

The import is light. torch is imported with the first use of ORTModule, an optimizer or an export,
and ONNX Runtime with the first ORTModule. `ortmodule.loops` has what a training loop may need
besides, `ortmodule.trainer` is Hugging Face's Trainer on ORTModule, and `python -m ortmodule.export`
prints the repairs. All other modules are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ortmodule._internal.base.settings import Settings
from ortmodule._internal.errors import MissingDependency, ORTModuleError, SettingError
from ortmodule._internal.version import __version__

if TYPE_CHECKING:
    from ortmodule._internal.export_onnx import export_onnx
    from ortmodule._internal.fp16_optimizer import FP16_Optimizer
    from ortmodule._internal.fused_adam import FusedAdam
    from ortmodule._internal.module import ORTModule
    from ortmodule._internal.native.check import check
    from ortmodule._internal.native.extensions import setup
    from ortmodule._internal.options import load
    from ortmodule._internal.report import report

__all__ = [
    "FP16_Optimizer",
    "FusedAdam",
    "MissingDependency",
    "ORTModule",
    "ORTModuleError",
    "SettingError",
    "Settings",
    "__version__",
    "check",
    "export_onnx",
    "load",
    "report",
    "setup",
]

# Imported on first use only, because most of them load torch.
_MODULE_BY_NAME = {
    "ORTModule": "module",
    "FusedAdam": "fused_adam",
    "FP16_Optimizer": "fp16_optimizer",
    "check": "native.check",
    "export_onnx": "export_onnx",
    "load": "options",
    "report": "report",
    "setup": "native.extensions",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}._internal.{_MODULE_BY_NAME[name]}"), name)

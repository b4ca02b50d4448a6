"""ONNX Runtime's ORTModule 1.19.2, repaired for current torch, for any training loop.

See docs/ortmodule.md. The package's import is light; torch is imported with the first use of
ORTModule, FusedAdam or FP16_Optimizer, and ONNX Runtime with the first ORTModule. The package does
not depend on recipes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.settings import SettingError, Settings

if TYPE_CHECKING:
    from ortlaunch.ortmodule.fp16_optimizer import FP16_Optimizer
    from ortlaunch.ortmodule.fused_adam import FusedAdam
    from ortlaunch.ortmodule.module import ORTModule

__all__ = ["FP16_Optimizer", "FusedAdam", "ORTModule", "SettingError", "Settings"]

# Imported on first use only, because they load torch.
_LAZY = {"ORTModule": "module", "FusedAdam": "fused_adam", "FP16_Optimizer": "fp16_optimizer"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)

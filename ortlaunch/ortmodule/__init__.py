"""ONNX Runtime's ORTModule 1.19.2, repaired for current torch, for any training loop.

See docs/ortmodule.md. The package's import is light; torch and ONNX Runtime are imported with the
first ORTModule. The package does not depend on recipes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.settings import SettingError, Settings

if TYPE_CHECKING:
    from ortlaunch.ortmodule.module import ORTModule

__all__ = ["ORTModule", "SettingError", "Settings"]


def __getattr__(name: str) -> object:
    if name != "ORTModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use only, because this import loads torch and ONNX Runtime.
    from ortlaunch.ortmodule import module

    return module.ORTModule

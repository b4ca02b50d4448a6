"""ONNX Runtime's ORTModule 1.19.2, right on today's torch, for any training loop: docs/ortmodule.md.

Importing this package is light; torch and ONNX Runtime come with the first ORTModule. Knows nothing of recipes.
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
    from ortlaunch.ortmodule import module

    return module.ORTModule

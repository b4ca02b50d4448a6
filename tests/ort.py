"""ONNX Runtime Training and its torch extensions, for tests that need them."""

from __future__ import annotations

from ortmodule_tests.ort import INSTALLED, build, needs_ort

__all__ = ["INSTALLED", "build", "needs_ort"]

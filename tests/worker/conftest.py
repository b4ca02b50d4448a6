"""Fixtures for tests on a rank's side, some of which run on ONNX Runtime."""

from __future__ import annotations

from tests.ortmodule.conftest import built, seeded, witness

__all__ = ["built", "seeded", "witness"]

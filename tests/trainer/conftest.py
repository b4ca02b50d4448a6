"""Fixtures of the tests of ORTTrainer."""

from __future__ import annotations

from tests.ortmodule.conftest import built

__all__ = ["built"]

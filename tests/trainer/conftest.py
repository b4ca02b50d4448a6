"""Fixtures of the tests of ORTTrainer."""

from __future__ import annotations

from tests.ortmodule.conftest import built
from tests.worker.hub import hub

__all__ = ["built", "hub"]

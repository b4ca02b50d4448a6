"""Fixtures of the tests of ORTTrainer."""

from __future__ import annotations

from ortmodule_tests.conftest import built
from ortmodule_tests.hub import hub

__all__ = ["built", "hub"]

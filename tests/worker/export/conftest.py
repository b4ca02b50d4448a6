"""Fixtures of the tests of exports."""

from __future__ import annotations

from tests.worker.hub import hub

__all__ = ["hub"]

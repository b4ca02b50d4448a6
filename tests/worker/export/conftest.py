"""Fixtures of the tests of exports."""

from __future__ import annotations

from ortmodule_tests.hub import hub

__all__ = ["hub"]

"""The skip of a test marked `lab` on a machine that lacks its tools."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

# Set on machines where a skipped lab test would be an error.
REQUIRED = os.environ.get("ORTLAUNCH_REQUIRE_LAB") == "1"


def skip(reason: str) -> NoReturn:
    """Skip the test; fail it if ORTLAUNCH_REQUIRE_LAB=1 requires all lab tests to run."""
    if REQUIRED:
        pytest.fail(f"ORTLAUNCH_REQUIRE_LAB=1: {reason}")
    pytest.skip(reason)

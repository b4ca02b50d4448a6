"""What a test marked `lab` does where this machine cannot have what it takes."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = os.environ.get("ORTLAUNCH_REQUIRE_LAB") == "1"


def skip(reason: str) -> NoReturn:
    """Skip the test; fail it where ORTLAUNCH_REQUIRE_LAB=1 says that this machine must have all of it."""
    if REQUIRED:
        pytest.fail(f"ORTLAUNCH_REQUIRE_LAB=1: {reason}")
    pytest.skip(reason)

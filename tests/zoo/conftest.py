"""Collect the zoo only if its mark is requested, because that imports transformers."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the zoo out under the default mark expression."""
    return True if "not zoo" in config.option.markexpr else None

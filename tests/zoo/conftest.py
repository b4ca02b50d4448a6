"""Collecting the zoo imports transformers: only where its mark is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The default expression of marks leaves the zoo out."""
    return True if "not zoo" in config.option.markexpr else None

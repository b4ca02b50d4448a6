"""Fixtures for tests on ONNX Runtime."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.ortmodule.witness import Witness
from tests.ort import build
from tests.ortmodule.forks import fresh

__all__ = ["fresh"]


@pytest.fixture(scope="session")
def built() -> None:
    """The extensions of this stack."""
    build()


@pytest.fixture
def witness(built: None) -> Witness:
    """Counts what ORT runs in this test."""
    witness = Witness()
    witness.install()
    return witness


@pytest.fixture
def seeded() -> None:
    """The same weights in every run."""
    torch.manual_seed(0)

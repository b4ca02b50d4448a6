"""Fixtures: one lab for all tests of this folder, and a user's folder on its shared disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import labs
from tests.cluster.home import Home
from tests.cluster.lab import Lab, lacking


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab of three hosts, a login node and Slurm."""
    lack = lacking()
    if lack:
        labs.skip(lack)
    # The alias lets a test list one machine under two names.
    with Lab(hosts=3, aliases=1) as running:
        yield running


@pytest.fixture
def home(lab: Lab, tmp_path: Path) -> Home:
    """A user's folder with a recipe that trains slowly."""
    return Home(lab, tmp_path)

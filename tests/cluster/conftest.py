"""One lab for all tests of this folder, and a user's folder on its shared disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import labs
from tests.cluster.lab import Lab, lacking


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three hosts, a login node and Slurm."""
    lack = lacking()
    if lack:
        labs.skip(lack)
    with Lab(hosts=3) as running:
        yield running

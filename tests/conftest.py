"""Fixtures shared by every folder of tests."""

from __future__ import annotations

import os

import pytest

from ortlaunch.rank import VARIABLES

# What launchers, schedulers and shells leave: a test that starts under one of them must not become its rank.
_LEFT_BY_LAUNCHERS = (
    "OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "HYDI_", "MV2_", "PALS_", "SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_",
    "ROLE_", "CUDA_VISIBLE_DEVICES", "ORTLAUNCH_PROGRESS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes launchers' variables, and GPUs but for tests marked gpu, from this process and what it starts."""
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(_LEFT_BY_LAUNCHERS):
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

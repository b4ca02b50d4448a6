"""A process of another user at every port of a run on one host: nothing is read, changed or hung."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import labs
from tests.launch.tiny import needs_mpi, write_recipe

# Rank 1 is late, so that the stranger connects before it does.
LATE = """
import time

def stacked(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    time.sleep(0.5)
"""
ALL = [
    pytest.param("torchrun"),
    pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow, pytest.mark.ci]),
]


@pytest.mark.lab
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ALL)
def test_a_stranger_at_every_port(launcher: str, tmp_path: Path) -> None:
    """The run ends within seconds, and names the stranger; nothing was sent to it."""
    if os.geteuid():
        labs.skip("only root can start a process of another user")
    data = {"train": {"format": "custom", "factory": "mine:data"}, "collate": "mine:stacked"}
    write_recipe(tmp_path, data=data)
    with open(tmp_path / "mine.py", "a") as module:
        module.write(LATE)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.launch.strangers", str(tmp_path), launcher],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, timeout=100, check=True,
    )  # fmt: skip
    seen = json.loads(ended.stdout)
    # A line of the launcher's own library may precede it.
    assert seen["bytes"] == 0, seen
    assert seen["ports"] >= 1
    assert (
        seen["status"],
        "a process of another user (uid 54321) is connected" in seen["output"],
    ) == (
        1,
        True,
    ), seen["output"]
    assert seen["seconds"] < 40

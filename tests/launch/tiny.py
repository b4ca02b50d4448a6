"""A user's own tiny model and data beside a recipe, the command as a user types it, and the processes of a run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.errors import MissingDependency
from ortlaunch.launch import mpi
from tests.makers import CUSTOM

ORTLAUNCH = str(Path(sys.executable).with_name("ortlaunch"))
RECIPE = "recipe.yaml"


def _lacking_for_mpi() -> str:
    """What keeps tests from running ranks under mpirun, or nothing."""
    try:
        mpi.find_mpirun()
    except MissingDependency as error:
        return str(error)
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


NO_MPI = _lacking_for_mpi()
needs_mpi = pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
LAUNCHERS = ("torchrun", pytest.param("mpi", marks=needs_mpi))
MODULE = '''
"""A model of five weights that can be told to fail in one rank at one step."""
import os, signal, sys, time
import torch

class Model(torch.nn.Module):
    def __init__(self, how, rank, step):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.how, self.rank, self.step, self.passes = how, rank, step, 0

    def forward(self, x, y):
        self.passes += 1
        if int(os.environ["RANK"]) == self.rank and self.passes == self.step:
            self.fail()
        return ((self.linear(x) - y) ** 2).mean()

    def fail(self):
        if self.how == "exits":
            sys.exit(7)
        if self.how == "raises":
            raise ValueError("planted")
        if self.how == "leaves":
            os._exit(0)
        if self.how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "loses its guardian":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if self.how == "waits":
            open("waiting", "w").close()
            time.sleep(600)

def model(how="trains", rank=1, step=2):
    return Model(how, rank, step)

def data():
    generator = torch.Generator().manual_seed(0)
    def draw(size):
        return torch.randn(size, generator=generator)
    return [{"x": draw(4), "y": draw(1)} for _ in range(64)]
'''


def write_recipe(folder: Path, how: str = "trains", **sections: Any) -> Path:
    """Write the module and its recipe; returns the recipe."""
    (folder / "mine.py").write_text(MODULE)
    model = {**CUSTOM["model"], "arguments": {"how": how}}
    path = folder / RECIPE
    path.write_text(yaml.safe_dump({**CUSTOM, "model": model, **sections}))
    return path


def ortlaunch(folder: Path, *arguments: str, timeout: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, as a user does."""
    return subprocess.run(
        [ORTLAUNCH, *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def processes_in(folder: Path) -> dict[int, str]:
    """Command lines of the living processes whose working directory is `folder`, by id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder and (entry / "stat").read_text().rpartition(")")[2].split()[
                0
            ] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # gone in the meantime, or not ours
            continue
    return found


def wait_until_gone(folder: Path, seconds: float = 5.0) -> dict[int, str]:
    """Processes in `folder` that still live after `seconds`; returns early when there are none."""
    deadline = time.monotonic() + seconds
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left

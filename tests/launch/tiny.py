"""A user's own tiny model and data beside a recipe, the command as a user types it, and what it left."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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
TORCHRUN_FIRST = (
    "torchrun",
    pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow, pytest.mark.ci]),
)  # mpi is CI's
MODULE = """
import os
import signal
import subprocess
import torch

class Model(torch.nn.Module):
    def __init__(self, fails, guardian_sleeps):
        super().__init__()
        self.linear, self.fails, self.guardian_sleeps = torch.nn.Linear(4, 1), fails, guardian_sleeps

    def forward(self, x, y):
        if self.fails and os.environ["RANK"] == "1":
            if self.guardian_sleeps:
                os.kill(os.getppid(), signal.SIGSTOP)
                wake = f"sleep {self.guardian_sleeps}; kill -CONT {os.getppid()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True, stderr=subprocess.DEVNULL)
            raise ValueError("planted")
        return ((self.linear(x) - y) ** 2).mean()

def model(fails=False, guardian_sleeps=0):
    return Model(fails, guardian_sleeps)

def data():
    return [{"x": torch.ones(4) * i / 64, "y": torch.ones(1)} for i in range(64)]
"""


def write_recipe(
    folder: Path, fails: bool = False, guardian_sleeps: float = 0, **sections: Any
) -> Path:
    """Write the module and its recipe, whose rank 1 may fail, its guardian asleep for some seconds; the recipe."""
    (folder / "mine.py").write_text(MODULE)
    model = {**CUSTOM["model"], "arguments": {"fails": fails, "guardian_sleeps": guardian_sleeps}}
    path = folder / RECIPE
    path.write_text(yaml.safe_dump({**CUSTOM, "model": model, **sections}))
    return path


def ortlaunch(
    folder: Path,
    *arguments: str,
    timeout: float = 60,
    command: tuple[str, ...] = (ORTLAUNCH,),
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, as a user does."""
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def noting_opens(folder: Path) -> dict[str, str]:
    """Variables that let every Python process note which of the folder's own recipes it opens; read by `opened`."""
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, sys\n"
        "notes = os.open(os.environ['OPENED'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "folder = os.path.dirname(os.environ['OPENED'])\n"
        "def note(event, given):\n"
        "    if event == 'open' and str(given[0]).endswith('.yaml'):\n"
        "        path = os.path.abspath(given[0])\n"
        "        if os.path.dirname(path) == folder:\n"
        "            os.write(notes, os.path.basename(path).encode() + b'\\n')\n"
        "sys.addaudithook(note)\n"
    )
    return {"PYTHONPATH": str(hook), "OPENED": str(folder / "opened")}


def opened(folder: Path) -> list[str]:
    """The folder's own recipes that were opened, each as often as it was."""
    return sorted((folder / "opened").read_text().splitlines())


def processes_of(folder: Path) -> list[int]:
    """Living processes with the folder in their command line: launchers, guardians and ranks of the run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in words and status.rpartition(")")[2].split()[0] != "Z":
            found.append(int(entry.name))
    return found

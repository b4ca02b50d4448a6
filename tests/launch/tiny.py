"""A tiny model and data of the user's own, the command as a user types it, and its processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import MissingDependency
from ortlaunch.launch import mpi
from tests.makers import CUSTOM

ORTLAUNCH = str(Path(sys.executable).with_name("ortlaunch"))
RECIPE = "recipe.yaml"


def _lacking_for_mpi() -> str:
    """Return why tests cannot run ranks under mpirun; empty if they can."""
    try:
        mpi.require_mpirun_here_or_on_path()
    except MissingDependency as error:
        return str(error)
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


NO_MPI = _lacking_for_mpi()
needs_mpi = pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
LAUNCHERS = ("torchrun", pytest.param("mpi", marks=needs_mpi))
MODULE = """
import os
import signal
import subprocess
import torch

class Model(torch.nn.Module):
    def __init__(self, fails, supervisor_sleeps):
        super().__init__()
        self.linear, self.fails, self.supervisor_sleeps = torch.nn.Linear(4, 1), fails, supervisor_sleeps

    def forward(self, x, y):
        if self.fails and os.environ["RANK"] == "1":
            if self.supervisor_sleeps:
                os.kill(os.getppid(), signal.SIGSTOP)
                wake = f"sleep {self.supervisor_sleeps}; kill -CONT {os.getppid()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True, stderr=subprocess.DEVNULL)
            raise ValueError("planted")
        return ((self.linear(x) - y) ** 2).mean()

def model(fails=False, supervisor_sleeps=0):
    return Model(fails, supervisor_sleeps)

def data():
    # Each rank's threads sleep while they wait; `ortlaunch` below has removed the tests' own value.
    assert os.environ["OMP_WAIT_POLICY"].lower() == "passive"
    return [{"x": torch.ones(4) * i / 64, "y": torch.ones(1)} for i in range(64)]
"""


def write_recipe(
    folder: Path, fails: bool = False, supervisor_sleeps: float = 0, **sections: Any
) -> Path:
    """Write the module and its recipe, and return the recipe's path.

    Args:
        fails: whether rank 1 raises an error.
        supervisor_sleeps: seconds for which rank 1's supervisor is suspended before that error.
    """
    (folder / "mine.py").write_text(MODULE)
    model = {
        **CUSTOM["model"],
        "arguments": {"fails": fails, "supervisor_sleeps": supervisor_sleeps},
    }
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
    own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**own, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def noting_opens(folder: Path) -> dict[str, str]:
    """Return variables that let every Python process record the folder's recipes that it opens."""
    # Python imports sitecustomize at its start, also in processes of other launchers.
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
    """Return the folder's recipes that were opened, each as often as it was."""
    return sorted((folder / "opened").read_text().splitlines())


def processes_of(folder: Path) -> list[int]:
    """Return the living processes with the folder in their command line: all those of a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
        # The process ended meanwhile.
        except OSError:
            continue
        # Z: a zombie has ended, although its parent has not read its status.
        if str(folder).encode() in words and status.rpartition(")")[2].split()[0] != "Z":
            found.append(int(entry.name))
    return found

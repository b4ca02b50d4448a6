"""Whole runs that stall, that are killed and restart by themselves, or that fail twice alike."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.victim import Victim, processes, wait

# In seconds: `train.stall_seconds`, and the time that the report of a stall may take more.
STALL_SECONDS = 5
MORE_SECONDS = 5.0
# Rank 1 misbehaves, and writes the time of that to the file `began`.
MODULE = """
import os, signal, time, torch, torch.distributed as dist

MINE = lambda: os.environ.get("RANK", "0") == "1"

class Net(torch.nn.Module):
    def __init__(self, how, step, pause):
        super().__init__()
        self.layer, self.how, self.step, self.pause, self.passes = torch.nn.Linear(4, 1), how, step, pause, 0

    def forward(self, x, y):
        self.passes += 1
        time.sleep(self.pause)
        if MINE() and self.passes == self.step:
            self.act()
        return ((self.layer(x) - y) ** 2).mean()

    def act(self):
        here = os.path.dirname(__file__)
        if self.how:
            open(os.path.join(here, "began"), "w").write(str(time.time()))
        if self.how == "raise":
            raise ValueError("planted")
        if self.how == "supervisor":
            os.kill(os.getppid(), signal.SIGSTOP)
        if self.how in ("stop", "supervisor"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "sleep":
            time.sleep(1000)
        if self.how == "collective":
            dist.barrier()

class Data:
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if self.how == "sample" and MINE() and i == 20:
            open(os.path.join(os.path.dirname(__file__), "began"), "w").write(str(time.time()))
            time.sleep(1000)
        return {"x": torch.ones(4) * i / 64, "y": torch.ones(1)}

def model(how="", step=7, pause=0.0):
    return Net(how, step, pause)

def data(how=""):
    if how == "factory" and MINE():
        open(os.path.join(os.path.dirname(__file__), "began"), "w").write(str(time.time()))
        time.sleep(1000)
    return Data(how)
"""
RECIPE: dict[str, Any] = {
    "name": "supervised",
    "model": {"task": "custom", "factory": "supervised_model:model"},
    "data": {"train": {"format": "custom", "factory": "supervised_model:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "engine": {"name": "eager"},
    "train": {"max_steps": 40, "stall_seconds": STALL_SECONDS},
    "log": {"every_steps": 1},
    "checkpoint": {"every_steps": 4},
}
# These stalls happen in the data set, the others in the model.
IN_DATA = ("factory", "sample")
STALLS = ("stop", "supervisor", "sleep", "collective", *IN_DATA)


class Run(Victim):
    """One command in a folder of its own; `how` is the way in which rank 1 fails."""

    def __init__(self, folder: Path, launcher: str, **arguments: object) -> None:
        folder.mkdir(parents=True)
        how = arguments.pop("how", "")
        recipe = {**RECIPE, **arguments}
        kind, part = (
            ("data", recipe["data"]["train"]) if how in IN_DATA else ("model", recipe["model"])
        )
        part = {**part, "arguments": {**part.get("arguments", {}), "how": how}}
        recipe[kind] = {"train": part} if kind == "data" else part
        (folder / "supervised_model.py").write_text(MODULE)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        super().__init__(
            folder, ("--nproc-per-node", "2", "--launcher", launcher), dict(os.environ)
        )

    def lines(self) -> list[str]:
        return (self.folder / "output").read_text(errors="replace").splitlines()

    def finish(self, seconds: float) -> int:
        """Return the exit status, or -1 if the run has not ended after `seconds`."""
        wait(lambda: self.command.poll() is not None, seconds)
        status = self.command.poll()
        return -1 if status is None else status

    def left(self, seconds: float = 10.0) -> list[int]:
        """Return the processes that are still alive after `seconds`, and end them."""
        wait(lambda: not processes(self.run), seconds, 0.2)
        there = list(processes(self.run))
        self.end()
        return there


CI = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param(
            launcher,
            how,
            marks=CI if (launcher, how) == ("torchrun", "sleep") else pytest.mark.slow,
        )
        for launcher in ("torchrun", "mpi")
        for how in STALLS
    ],
)
def test_a_rank_that_stands_still(launcher: str, how: str, tmp_path: Path) -> None:
    """A rank that stalls in any way is named in time, with its stack; status 124, no process left.

    The rank or its supervisor is stopped, the model sleeps or calls a collective alone, or the
    data hang. The report comes within `train.stall_seconds` and 5 s.
    """
    run = Run(tmp_path / how, launcher, how=how)
    verdict = _wait_for_verdict(run, 150)
    took = time.time() - float((run.folder / "began").read_text())
    status = run.finish(60)
    left = run.left()
    assert "rank 1 on host" in verdict
    assert took <= STALL_SECONDS + MORE_SECONDS
    assert status == 124
    assert not left
    # A stopped supervisor cannot record its rank's stack.
    if how != "supervisor":
        assert '"traceback": ""' not in (run.run / "errors" / "stall.json").read_text()


def _wait_for_verdict(run: Run, seconds: float) -> str:
    def found() -> list[str]:
        return [line for line in run.lines() if "has stalled" in line]

    wait(lambda: found() or run.command.poll() is not None, seconds, 0.1)
    return next(iter(found()), "")


@pytest.mark.parametrize(
    ("launcher", "kills"),
    [
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 3, marks=pytest.mark.nightly),
        pytest.param("mpi", 3, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_finishes_by_itself(launcher: str, kills: int, tmp_path: Path) -> None:
    """A run whose ranks are killed at random moments restarts and ends with the undisturbed
    weights."""
    # A fixed seed repeats the moments.
    chance = random.Random(1)
    # 0.5 s for each pass, so that a kill comes during training.
    model: dict[str, Any] = {**RECIPE["model"], "arguments": {"pause": 0.5}}
    whole = Run(tmp_path / "whole", launcher)
    assert whole.finish(200) == 0
    run = Run(tmp_path / "killed", launcher, model=model, launch={"max_restarts": 3})
    killed = 0
    while run.command.poll() is None and killed < kills:
        time.sleep(chance.uniform(8.0, 32.0))
        if ranks := run.ranks():
            os.kill(chance.choice(ranks).pid, signal.SIGKILL)
            killed += 1
    assert run.finish(300) == 0, run.lines()[-5:]
    assert not run.left()
    names = [one.folder / "run/export/model.safetensors" for one in (whole, run)]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=CI), pytest.param("mpi", marks=pytest.mark.nightly)]
)
def test_a_failure_that_repeats_stops_the_second_time(launcher: str, tmp_path: Path) -> None:
    """A run that fails twice in the same step ends, although more restarts are allowed."""
    run = Run(
        tmp_path / "twice",
        launcher,
        how="raise",
        launch={"max_restarts": 3},
        # No checkpoint before step 7, so that the restart repeats the same steps.
        checkpoint={"every_steps": 100},
    )
    status = run.finish(200)
    left = run.left()
    last = run.lines()[-1]
    assert status == 1
    assert "deterministic" in last
    assert "after step 6" in last
    assert sorted(path.name for path in (run.run / "attempts").glob("*")) == ["1"]
    assert not left

"""Runs whose processes are all killed repeatedly, or whose rank dies during a checkpoint."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.run_folder.folder import RunDir
from tests.e2e import forked
from tests.e2e.lives import Life, differences
from tests.e2e.runs import EAGER, TOY, TWO_RANKS, Train, ended_well, merged
from tests.ort import build, needs_ort

MODULE = '''
import time
import torch
from torch import nn


class Net(nn.Module):
    """Large enough that a checkpoint takes a moment; with dropout, so that a wrong seed is seen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 1024), nn.GELU(), nn.Dropout(0.2), nn.Linear(1024, 1024), nn.Linear(1024, 1)
        )

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()


class Data:
    """Read as slowly as real data, so that there is time to kill."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        time.sleep(0.005)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum().reshape(1)}


def net():
    return Net()


def data():
    return Data()
'''
# More steps than a start does on average, so that the run does not end before its last kill.
STEPS_A_KILL = 6


def recipe(engine: str, kills: int) -> dict[str, Any]:
    """Return the recipe of the toy."""
    return {
        "name": "killed",
        "model": {"task": "custom", "factory": "killed_toy:net"},
        "data": {"train": {"format": "custom", "factory": "killed_toy:data"}},
        "batch": {"global_size": 16, "micro_size": 8},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "engine": {"name": engine, **({"parity_steps": 0} if engine == "ort" else {})},
        "zero": {"stage": 1},
        "train": {"max_steps": max(12, STEPS_A_KILL * kills)},
        "checkpoint": {"every_steps": 2, "every_minutes": None, "keep": 2},
        "log": {"every_steps": 1},
    }


def one_kill(home: Path, number: int, chance: random.Random) -> dict[str, Any]:
    """Start the run and kill it during a save, between two saves, or while it starts."""
    how = ["partial", "between", "partial", "between", "partial", "partial", "between", "starting"][
        number % 8
    ]
    life = Life(home, "killed")
    before = number and RunDir(home / "killed").complete_checkpoints()
    if how == "starting":
        time.sleep(chance.uniform(0.1, 4.0))
    else:
        # Each such start makes progress.
        life.wait_for("complete")
        # Listed before the moment: listing takes longer than a checkpoint.
        life.look()
        if how == "partial":
            life.wait_for("partial")
        time.sleep(chance.uniform(0, 0.01 if how == "partial" else 0.4))
    life.kill()
    if life.process.exitcode != -signal.SIGKILL:
        pytest.fail(
            f"kill {number}: the run had ended with {life.process.exitcode} before it was killed"
        )
    resumed = life.resumed_after()
    # A start that was killed early may not have printed from which step it resumes.
    expected = before[-1][0] if before else 0
    if resumed != expected and not (how == "starting" and resumed == 0):
        pytest.fail(
            f"kill {number}: went on from step {resumed}, and {expected} was the newest "
            "complete one"
        )
    partial = any(life.run.checkpoints.glob("step_*.partial"))
    return {
        "kill": number + 1,
        "how": how,
        "partial": partial,
        "from": resumed,
        "complete": life.complete(),
    }


@needs_ort
@pytest.mark.parametrize(
    ("kills", "engine"),
    [
        pytest.param(2, "ort", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(100, "ort", marks=[pytest.mark.nightly, pytest.mark.timeout(4 * 3600)]),
        pytest.param(15, "eager", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
    ],
)
def test_a_run_that_is_killed_again_and_again(
    kills: int,
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """A run that is killed repeatedly, also during saves, equals an undisturbed run bit for bit.

    Each restart loads the newest complete checkpoint.
    """
    build()
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "killed_toy.py").write_text(MODULE)
    (tmp_path / "killed.yaml").write_text(yaml.safe_dump(recipe(engine, kills)))
    forked.preload()
    # A fixed seed for each test, though the moments still depend on the machine.
    chance = random.Random(kills)
    seen = [one_kill(tmp_path, number, chance) for number in range(kills)]
    partial = sum(each["partial"] for each in seen)
    record_property("while a checkpoint was written", partial)
    Life(tmp_path, "killed").end()
    Life(tmp_path, "straight").end()
    assert "is damaged" not in (tmp_path / "killed.log").read_text()
    assert differences(RunDir(tmp_path / "straight"), RunDir(tmp_path / "killed")) == []
    # Fewer would mean that saves were hardly tested.
    assert partial >= 0.3 * kills, seen


DIES = '''
import os, signal
from pathlib import Path
from toys import data, net as plain

def net(folder):
    """Rank 1 dies when it has written its part of step 4's checkpoint, before it is on the disk; once."""
    sync, mark = os.fsync, Path(folder, "died")

    def die(handle):
        if Path(folder, "checkpoints/step_00000004.partial").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    if os.environ["RANK"] == "1":
        os.fsync = die
    return plain()
'''


@pytest.mark.slow
def test_a_save_whose_rank_dies(train: Train, home: Path) -> None:
    """A run names a rank that dies in a save, and the next start uses the older checkpoint."""
    (home / "dies.py").write_text(DIES)
    arguments = {"folder": str(home / "dies")}
    recipe = merged(
        TOY,
        {
            **EAGER,
            "zero": {"stage": 1},
            "checkpoint": {"every_steps": 2},
            "train": {"max_steps": 6},
        },
    )
    recipe = {**recipe, "model": {"task": "custom", "factory": "dies:net", "arguments": arguments}}
    failed = train("dies", recipe, *TWO_RANKS)
    assert failed.status != 0
    assert "rank 1" in failed.err
    names = {path.name for path in (failed.folder / "checkpoints").iterdir()}
    assert names == {"step_00000002", "step_00000004.partial"}
    again = ended_well(train("dies", recipe, *TWO_RANKS))
    assert "step_00000004.partial: incomplete: the save was interrupted" in again.out
    assert "resumed after step 2 from" in again.out
    assert {path.name for path in (failed.folder / "checkpoints").iterdir()} == {
        f"step_0000000{step}" for step in (2, 4, 6)
    }
    assert len(again.losses()) == 6

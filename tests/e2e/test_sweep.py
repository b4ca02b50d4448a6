"""Tests of whole sweeps: killed and continued, pruned, and the best recipe trained again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.api.sweep import Sweep
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from tests.e2e.runs import EAGER, SLOW, TOY, environment, merged, reach
from tests.launch.tiny import processes_of

pytest.importorskip("optuna")
ORTLAUNCH = [sys.executable, "-m", "ortlaunch"]
HELD_OUT = {"format": "custom", "factory": "toys:data", "arguments": {"seed": 1, "samples": 32}}
SWEPT: dict[str, Any] = merged(
    TOY,
    {
        **EAGER,
        "model": {"factory": "slow:net"},
        "data": {"evaluation": HELD_OUT},
        "train": {"evaluate_every_steps": 2, "hook": "slow:Stopping"},
        "log": {"every_steps": 1},
        "checkpoint": {"every_steps": 2},
        "sweep": {
            "space": {"optimizer.learning_rate": {"choice": [1e-2, 1e-9, 1e-3]}},
            "sampler": "grid",
            "pruner": "median",
            "parallel": 2,
        },
    },
)


# Stops the trial with the smallest rate.
HOOK = """

class Stopping:
    def on_step(self, step, values):
        return "stop" if values["learning_rate"] < 1e-8 and step == 7 else None
"""


def sweep(home: Path) -> subprocess.Popen[str]:
    """Start `ortlaunch sweep` in the folder."""
    return subprocess.Popen(
        [*ORTLAUNCH, "sweep", "swept.yaml"],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def evaluations(run: RunDir) -> list[tuple[int, float]]:
    """Return step and loss of each evaluation."""
    rows = read_json_lines_with_keys(run.metrics, "step").values
    return [(row["step"], row["evaluation_loss"]) for row in rows if "evaluation_loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep_is_killed(home: Path) -> None:
    """Kills of a trial and of the sweep lose no trial, count none twice and leave no process.

    The best trial's recipe, trained again, gives the same evaluation.
    """
    (home / "slow.py").write_text(SLOW + HOOK)
    (home / "slow").touch()
    (home / "swept.yaml").write_text(yaml.safe_dump(SWEPT))
    first = sweep(home)
    try:
        run = RunDir(home / "sweeps/toy/trials/0000")
        reach(run, 3, first)
        # The trial's command: the sweep starts it again, from its checkpoint.
        os.kill(lock.process_that_last_locked_run(run).pid, signal.SIGKILL)
        reach(run, 5, first)
        first.kill()
        first.communicate()
        deadline = time.monotonic() + 60
        while processes_of(Path("sweeps/toy/trials")):
            assert time.monotonic() < deadline, "a process outlived its sweep"
            time.sleep(0.1)
    finally:
        (home / "slow").unlink()
        first.kill()
    assert Sweep(home / "sweeps/toy").trials()[0].state == "running"
    second = sweep(home)
    printed, _ = second.communicate(timeout=150)
    assert second.returncode == 0, printed
    found = Sweep(home / "sweeps/toy")
    trials = found.trials()
    assert [one.number for one in trials] == [0, 1, 2]
    assert [one.fields for one in trials] == [
        {"optimizer.learning_rate": rate} for rate in (1e-2, 1e-9, 1e-3)
    ]
    assert trials[0][1:2] + trials[0][4:5] == ("complete", 10)
    assert {one.state for one in trials[2:]} <= {"complete", "pruned"}
    # Ended by its hook, and not started again.
    assert trials[1].state == "complete"
    assert 7 <= trials[1].steps < 10
    assert [one.number for one in found.best()] == [0]
    # The module of the user is beside the recipe.
    (home / "again.yaml").write_text(found.recipe(0).read_text())
    words = [*ORTLAUNCH, "train", "again.yaml", "--run-dir=again"]
    subprocess.run(words, cwd=home, env=environment(home), check=True, timeout=100)
    # A stop at the step of an evaluation left that one out.
    assert set(evaluations(run)) <= set(evaluations(RunDir(home / "again")))
    assert len(evaluations(run)) >= 3
    assert found.report().stat().st_size > 10_000

"""Tests of whole sweeps: killed and continued, pruned, and the best recipe trained again."""

from __future__ import annotations

import contextlib
import json
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


# What a rank could inherit of an earlier one in its process, and what it leaves itself.
WITNESS = """
import gc, json, os, random, signal, sys, threading
import numpy, torch
from toys import Net, data

STATE = {
    "drawn": [random.random(), float(numpy.random.rand()), float(torch.rand(()))],
    "environ": {name: value for name, value in os.environ.items() if not name.startswith("ORTLAUNCH")},
    "folder": os.getcwd(),
    "path": sys.path[:],
    "mine": [name for name in sys.modules if name in ("toys", "slow", "witness")],
    "collector": [gc.isenabled(), gc.get_threshold()],
    "handlers": [str(signal.getsignal(number)) for number in (1, 2, 10, 12, 14, 15)],
    "cpus": sorted(os.sched_getaffinity(0)),
    "output": [type(sys.stdout).__name__, sys.stdout.errors],
}

def net(dropout=0.0, is_killed=False):
    STATE["threads"] = torch.get_num_threads()
    STATE["descriptors"] = len(os.listdir("/proc/self/fd"))
    with open("witnessed.jsonl", "a") as file:
        print(json.dumps(STATE, default=sorted), file=file)
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["LEFT"] = "by a trial"
    sys.path.append("left")
    random.seed(0)
    torch.set_num_threads(2)
    return Net(dropout, 0, "", 1.0)
"""


def living_processes(mark: str) -> list[str]:
    """Return the states of processes with a text in the environment that they were started with."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or be another user's.
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "stat").read_text())
    return found


def sweep(home: Path) -> subprocess.Popen[str]:
    """Start `ortlaunch sweep` in the folder."""
    return subprocess.Popen(
        [*ORTLAUNCH, "sweep", "swept.yaml"],
        cwd=home,
        env={**environment(home), "MARK": str(home / "mark")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def evaluations(run: RunDir) -> list[tuple[int, float]]:
    """Return step and loss of each evaluation."""
    rows = read_json_lines_with_keys(run.metrics, "step").values
    return [(row["step"], row["evaluation_loss"]) for row in rows if "evaluation_loss" in row]


def test_trials_are_forked(home: Path) -> None:
    """Two interpreters start for all trials, and a trial is what its own command would be.

    One that is killed ends as a run does, and the others go on.
    """
    (home / "witness.py").write_text(WITNESS)
    (home / "site").mkdir()
    starts = home / "starts"
    (home / "site/sitecustomize.py").write_text(
        f"import sys\nopen({str(starts)!r}, 'a').write(sys.orig_argv[-1] + chr(10))\n"
    )
    space = {"model.arguments": {"choice": [{"is_killed": True}, {"dropout": 0.3}, {}]}}
    recipe = merged(SWEPT, {"model": {"factory": "witness:net"}, "train": {"hook": None}})
    recipe["sweep"] = {"space": space, "sampler": "grid"}
    (home / "swept.yaml").write_text(yaml.safe_dump(recipe))
    variables = {**environment(home), "PYTHONPATH": str(home / "site")}

    def run(*words: str) -> None:
        command = [*ORTLAUNCH, *words]
        subprocess.run(command, cwd=home, env=variables, check=True, timeout=100)

    run("sweep", "swept.yaml", "--run-dir=forked")
    assert starts.read_text().split() == ["--run-dir=forked", "ortlaunch.worker.prepared"]
    run("train", "swept.yaml", "model.arguments.dropout=0.3", "--run-dir=executed")
    *forked, executed = map(json.loads, (home / "witnessed.jsonl").read_text().splitlines())
    # The killed one starts three times.
    assert forked == [executed] * 5
    trials = Sweep(home / "forked").trials()
    assert [trial.state for trial in trials] == ["fail", "complete", "complete"]
    assert "was killed (SIGKILL)" in trials[0].reason
    runs = [RunDir(home / "forked/trials" / f"000{number}") for number in (1, 2)]
    assert metrics(RunDir(home / "executed")) == metrics(runs[0]) != metrics(runs[1])


def metrics(run: RunDir) -> list[dict[str, float]]:
    """Return what a run records of its steps, without times."""
    rows = read_json_lines_with_keys(run.metrics, "step").values
    return [{k: v for k, v in row.items() if "loss" in k or "norm" in k} for row in rows]


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
        while living_processes(str(home / "mark")):
            assert time.monotonic() < deadline, "a process outlived its sweep"
            time.sleep(0.1)
        assert Sweep(home / "sweeps/toy").trials()[0].state == "running"
        second = sweep(home)
        reach(run, 7, second)
        second.terminate()
        printed, _ = second.communicate(timeout=50)
        assert (second.returncode, living_processes(str(home / "mark"))) == (85, []), printed
    finally:
        (home / "slow").unlink()
        first.kill()
    third = sweep(home)
    printed, _ = third.communicate(timeout=150)
    assert third.returncode == 0, printed
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

"""A sweep whose trials are jobs of Slurm, or share the hosts of a host file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from tests.cluster.home import RECIPE, Home
from tests.cluster.lab import LOGIN
from tests.e2e.runs import COMMAND, merged, reach

pytest.importorskip("optuna")
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(280)]
HELD_OUT = {"format": "custom", "factory": "toys:data", "arguments": {"seed": 1, "samples": 32}}
RATE = "optimizer.learning_rate"


def write(home: Home, steps: int, rates: list[float], **keys: Any) -> list[RunDir]:
    """Write a recipe that sweeps these rates, two at a time, and return the trials' folders."""
    changes = {
        "data": {"evaluation": HELD_OUT},
        "train": {"max_steps": steps, "evaluate_every_steps": 4},
        "sweep": {"space": {RATE: {"choice": rates}}, "sampler": "grid", "parallel": 2, **keys},
    }
    (home.folder / "recipe.yaml").write_text(yaml.safe_dump(merged(RECIPE, changes)))
    return [RunDir(home.folder / "swept/trials" / f"{number:04d}") for number in range(len(rates))]


def states(home: Home) -> list[str]:
    """Return the state of each trial."""
    found = yaml.safe_load(home.well("sweep", "export", "swept"))
    return [one["state"] for one in found]


def listed_jobs(home: Home) -> set[str]:
    """Return the ids of the jobs that Slurm lists; ended jobs are included."""
    listed = home.lab.run(LOGIN, "squeue", "--noheader", "--states=all", "--name=toy", "-o", "%i")
    return set(listed.stdout.split())


def test_trials_are_jobs(home: Home) -> None:
    """A preempted job and a killed sweep lose no trial and queue none twice; a bad one is pruned."""
    runs = write(home, 20, [1e-2, 1e-3, 1e-9], submit=True, pruner="asha")
    words = [str(COMMAND), "sweep", "recipe.yaml", "--run-dir=swept"]
    # Slurm still lists the jobs of earlier tests.
    earlier = listed_jobs(home)
    first = subprocess.Popen(
        home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), *words]),
        env=home.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        reach(runs[0], 2, first)
        home.lab.run(
            LOGIN, "scancel", "--signal=USR1", read_json_or_raise_damaged(runs[0].job)["id"]
        )
    finally:
        first.kill()
        first.communicate()
    printed = home.well("sweep", "recipe.yaml", "--run-dir=swept", timeout=200)
    found = states(home)
    assert (found[0], found[2]) == ("complete", "pruned"), printed
    jobs = [read_json_or_raise_damaged(run.job) for run in runs]
    assert [one["backend"] for one in jobs] == ["slurm"] * 3
    assert listed_jobs(home) - earlier == {one["id"] for one in jobs}
    record = home.lab.run(LOGIN, "scontrol", "show", "job", jobs[0]["id"]).stdout
    assert "Restarts=1" in record
    steps = [
        row["step"]
        for row in read_json_lines_with_keys(runs[0].metrics, "step").values
        if "loss" in row
    ]
    assert steps == [*range(1, 21)]
    # The requested stop reached the ranks of the pruned job.
    assert runs[2].was_stop_requested_by_user_or_hook()


def test_trials_share_hosts(home: Home) -> None:
    """Of two hosts each trial at the same time has one."""
    Path(home.folder / "slow").unlink()
    runs = write(home, 4, [1e-2, 1e-3])
    home.well("sweep", "recipe.yaml", "--run-dir=swept", "--hostfile=hosts", timeout=200)
    assert states(home) == ["complete"] * 2
    hosts = [[node.host for node in Plan.read(run.plan).nodes] for run in runs]
    assert hosts == [["host1"], ["host2"]]

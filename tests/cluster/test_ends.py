"""Ends over hosts: a link that is lost in training, and a run in Slurm's queue that is asked to save and to stop."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND, EAGER, TOY, TOYS, environment, merged

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(200)]
SLOW = """
import time
from toys import Net, data

class Slow(Net):
    def forward(self, x, y):
        time.sleep(0.3)
        return super().forward(x, y)

def net():
    return Slow(0.0, 0, "", 1.0)
"""
RECIPE = merged(
    TOY,
    {
        **EAGER,
        "model": {"factory": "slow_toys:net"},
        "batch": {"micro_size": 8},
        "train": {"max_steps": 100_000},
    },
)


class Home:
    """A user's folder, and a command that is typed in it on the login node."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder, self.run = lab, folder, folder / "my run"
        self.env = {**lab.environ, **environment(folder), "PATH": lab.environ["PATH"]}
        for name, text in (("toys.py", TOYS), ("slow_toys.py", SLOW), ("recipe.yaml", yaml.safe_dump(RECIPE))):
            (folder / name).write_text(text)
        (folder / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
        (folder / "cache").mkdir()

    def well(self, *words: str) -> str:
        ended = self.lab.run(LOGIN, str(COMMAND), *words, cwd=self.folder, env=self.env, timeout=60)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def reach(self, step: int) -> None:
        deadline, metrics = time.monotonic() + 90, self.run / "metrics.jsonl"
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture
def home(lab: Lab, tmp_path: Path) -> Home:
    return Home(lab, tmp_path)


def test_a_link_that_is_lost(home: Home) -> None:
    """Under torchrun: named, with a status that is restarted from, and both sides end; 15 s when nothing else runs."""
    words = ["train", "recipe.yaml", "--hostfile", "hosts", "--launcher", "torchrun", "--run-dir", home.run.name]
    command = home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words])
    train = subprocess.Popen(command, env=home.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    home.reach(3)
    home.lab.link("host2", up=False)
    try:
        _, errors = train.communicate(timeout=40)
        assert (train.returncode, "rank 1 on host host2 is lost" in errors.splitlines()[-1]) == (1, True), errors
        deadline = time.monotonic() + 15
        while left := [line for line in home.lab.processes("host2") if home.run.name in line]:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    finally:
        train.kill()
        home.lab.link("host2", up=True)


def test_a_queued_run_that_is_asked(home: Home) -> None:
    """From the login node: a checkpoint, then a stop after which it is not queued again."""
    home.well("submit", "recipe.yaml", "--run-dir", home.run.name, "launch.nodes=2", "launch.processes_per_node=1")
    home.reach(3)
    assert home.well("checkpoint", home.run.name).startswith("saved after step ")
    assert f"{home.run.name}: preempted" in home.well("stop", home.run.name)
    time.sleep(3)
    status = json.loads(home.well("status", home.run.name, "--json"))
    assert (status["state"], status["job"]["exit_status"]) == ("preempted", 85)

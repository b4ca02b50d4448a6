"""Ends over hosts: a link that is lost in training, and a run in Slurm's queue that is asked to save and to stop."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.cluster.home import Home
from tests.cluster.lab import LOGIN
from tests.e2e.runs import COMMAND

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(200)]


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
    status = home.status()
    assert (status["state"], status["job"]["exit_status"]) == ("preempted", 85)

"""launch.nodes {min, max}: a run loses a host, continues without it, and readmits it on request."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from tests.cluster.home import RECIPE, Home
from tests.cluster.lab import LOGIN, wait_for
from tests.e2e.runs import COMMAND, merged

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(200)]
STEPS = 40
# Two ranks with micro batches of 8: one line a rank for each step.
SAMPLES = 16
# Each rank's process records, for each pass, the indices of the samples that it trains on.
SEEN = """
import os, time, torch
from toys import Net

FILE = f"{time.time():.6f}.{os.environ['WORLD_SIZE']}.{os.environ['RANK']}.seen"

class Seen(Net):
    def forward(self, x, y):
        if self.mark:
            time.sleep(0.15)
            with open(FILE, "a") as file:
                file.write(" ".join(str(int(i)) for i in y.flatten()) + "\\n")
        return super().forward(x, y / 1000)

def net(mark="notes"):
    return Seen(0.0, 0, mark, 1.0)

def data():
    return [{"x": torch.full((8,), i / 1000), "y": torch.tensor([float(i)])} for i in range(640)]
"""
ELASTIC = merged(
    RECIPE,
    {
        "model": {"factory": "seen_toys:net"},
        "data": {"train": {"factory": "seen_toys:data"}},
        "train": {"max_steps": STEPS},
        "checkpoint": {"every_steps": 5},
        "launch": {"nodes": {"min": 1, "max": 2}, "max_restarts": 2},
    },
)


def test_a_host_is_lost_and_taken_back(home: Home) -> None:
    """Each sample is trained on once, and the losses are those of one undisturbed process."""
    (home.folder / "seen_toys.py").write_text(SEEN)
    (home.folder / "recipe.yaml").write_text(yaml.safe_dump(ELASTIC))
    # Without `mark` the model neither records samples nor sleeps.
    alone = ("launch.nodes=1", "model.arguments={mark: ''}")
    home.well("train", "recipe.yaml", "--run-dir", home.run.name, *alone)
    undisturbed = home.losses()
    home.run = home.folder / "elastic"

    words = ["train", "recipe.yaml", "--hostfile", "hosts", "--run-dir", home.run.name]
    command = home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words])
    with (home.folder / "said").open("w") as said:
        train = subprocess.Popen(command, env=home.env, stdout=said, stderr=said)
    home.reach(8)
    home.lab.link("host2", up=False)
    try:
        home.reach(16)
    finally:
        home.lab.link("host2", up=True)
    back = home.well("restart", home.run.name)
    assert train.wait(timeout=60) == 0, (home.folder / "said").read_text()

    assert (
        "left out:   host2                reached        failed"
        in (home.folder / "said").read_text()
    )
    assert back.endswith(" on 2 hosts: host1, host2\n")
    # Steps after the checkpoint were lost with the host, and are trained again.
    first = json.loads((home.run / "job.json").read_text())["attempts"][0]["checkpoint"]
    second = int(back.split()[3])
    # File names begin with the start time. Two ranks may have it equal to the microsecond.
    names = sorted(home.folder.glob("*.seen"))
    assert [path.name.split(".")[2] for path in names] == list("22122"), (
        home.folder / "said"
    ).read_text()
    files = [path.read_text().splitlines() for path in names]
    both = files[:2]
    one = files[2]
    again = files[3:]
    # The single rank has two lines a step: its two accumulation passes.
    trained = [
        *both[0][:first],
        *both[1][:first],
        *one[: 2 * (second - first)],
        *again[0],
        *again[1],
    ]
    assert sorted(int(number) for line in trained for number in line.split()) == list(
        range(STEPS * SAMPLES)
    )
    assert home.losses() == pytest.approx(undisturbed, abs=1e-5)


# Modules of a run's processes; the lab's own command lines have its folder's name alone.
_OF_A_RUN = r"ortlaunch\.(launch|worker)|torch\.distributed\.run"


@pytest.mark.nightly
def test_a_host_that_hangs_and_comes_back(home: Home) -> None:
    """A host that was suspended does not decide on the start that followed, and keeps no process."""
    (home.folder / "seen_toys.py").write_text(SEEN)
    (home.folder / "recipe.yaml").write_text(yaml.safe_dump(ELASTIC))
    words = ["train", "recipe.yaml", "--hostfile", "hosts", "--run-dir", home.run.name]
    words += ["launch.grace_seconds=2", "launch.max_restarts=3"]
    command = home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words])
    with (home.folder / "said").open("w") as said:
        train = subprocess.Popen(command, env=home.env, stdout=said, stderr=said)
    home.reach(8)
    # sshd still answers, unlike that of a host under memory pressure: so that the host is left out,
    # its link is down at the look.
    home.lab.run("host2", "pkill", "-STOP", "-f", _OF_A_RUN)
    home.lab.link("host2", up=False)
    try:
        wait_for(
            lambda: "left out:   host2" in (home.folder / "said").read_text(), "the restart", 90
        )
    finally:
        home.lab.link("host2", up=True)
        home.lab.run("host2", "pkill", "-CONT", "-f", _OF_A_RUN)
    assert train.wait(timeout=90) == 0, (home.folder / "said").read_text()
    job = json.loads((home.run / "job.json").read_text())
    assert [one["cause"] for one in job["attempts"]] == ["host-lost"]
    wait_for(
        lambda: home.lab.run("host2", "pgrep", "-f", _OF_A_RUN).returncode == 1,
        "the end of host2's processes",
        60,
    )

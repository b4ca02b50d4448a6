"""How runs end that do not end well: exit status, cause, and no process left, with real torchrun and real mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.tiny import LAUNCHERS, processes_of

MODULE = """
import os, signal, sys, time, torch

class Net(torch.nn.Module):
    def __init__(self, how, step):
        super().__init__()
        self.layer, self.how, self.step, self.passes = torch.nn.Linear(4, 1), how, step, 0

    def forward(self, x, y):
        self.passes += 1
        if os.environ["RANK"] == "1" and self.passes == self.step:
            self.fail()
        if self.how == "slow":
            time.sleep(0.2)
        return ((self.layer(x) - y) ** 2).mean()

    def fail(self):
        if self.how == "exit 7":
            sys.exit(7)
        if self.how == "raise":
            raise ValueError("planted")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "leave with 0":
            os._exit(0)
        if self.how == "kill the guardian":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

def model(how, step=3):
    return Net(how, step)

def data():
    return [{"x": torch.ones(4) * i, "y": torch.ones(1)} for i in range(64)]
"""
RECIPE = """
name: failing
model: {task: custom, factory: "failing:model", arguments: {how: HOW}}
data: {train: {format: custom, factory: "failing:data"}}
batch: {micro_size: 2, accumulation_steps: 1}
optimizer: {name: sgd, learning_rate: 1e-6}
engine: {name: eager}
train: {max_steps: 100000}
log: {every_steps: 1}
"""
ENDS = {
    "exit 7": (7, ("rank 1 on host", "SystemExit", "exit status 7")),
    "raise": (1, ('raise ValueError("planted")', "ValueError: planted", "rank 1 on host", "exit status 1")),
    "kill": (137, ("rank 1 on host", "SIGKILL", "exit status 137")),
    "leave with 0": (1, ("rank 1 on host", "before the end", "exit status 1")),
    "kill the guardian": (137, ("rank 1 on host", "vanished")),
}


@pytest.fixture
def start(tmp_path: Path):
    """Starts a run of 2 ranks; ends, at the latest here, all that it started."""
    started = []

    def begin(launcher: str, how: str) -> subprocess.Popen[str]:
        (tmp_path / "failing.py").write_text(MODULE)
        (tmp_path / "recipe.yaml").write_text(RECIPE.replace("HOW", how))
        words = [
            "train",
            "recipe.yaml",
            "--nproc-per-node",
            "2",
            "--launcher",
            launcher,
            "--run-dir",
            str(tmp_path / "run"),
        ]
        command = [sys.executable, "-m", "ortlaunch.cli", *words]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def gone_within(folder: Path, seconds: float) -> bool:
    """Whether no process of the run is alive after at most so long."""
    deadline = time.monotonic() + seconds
    while processes_of(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_for_steps(folder: Path, count: int) -> None:
    """Wait until the run has trained some steps."""
    deadline = time.monotonic() + 60
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, "the run did not start to train"
        time.sleep(0.1)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", ENDS)
def test_a_failing_rank_is_named_and_its_status_kept(start, tmp_path: Path, launcher: str, how: str):
    """The command's status is the first failing rank's, the cause is printed last, and nothing is left."""
    status, words = ENDS[how]
    process = start(launcher, how)
    _, errors = process.communicate(timeout=80)
    last = "\n".join(errors.splitlines()[-25:])
    assert process.returncode == status, errors
    assert [word for word in words if word not in last] == [], errors
    assert gone_within(tmp_path, 5), processes_of(tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_ends_everything(start, tmp_path: Path, launcher: str):
    """SIGINT to the command ends every rank; the status is 130, as a shell's."""
    process = start(launcher, "slow")
    wait_for_steps(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors
    assert "stopped by SIGINT" in errors
    assert gone_within(tmp_path, 5), processes_of(tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_command_leaves_no_orphan(start, tmp_path: Path, launcher: str):
    """After `kill -9` of the command its launcher and ranks end by themselves."""
    process = start(launcher, "slow")
    wait_for_steps(tmp_path, 2)
    process.kill()
    assert gone_within(tmp_path, 20), processes_of(tmp_path)

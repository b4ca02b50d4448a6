"""The lab itself: shared and private folders, Slurm's ranks, and no process that outlives it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.lab import LOGIN, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_hosts_reach_each_other_and_share_one_disk_of_two(lab: Lab, tmp_path: Path) -> None:
    """ssh by name from any to any; /mnt and processes are a host's own, all other folders are the same."""
    (tmp_path / "shared").write_text("seen\n")
    lab.run("host1", "touch", "/mnt/mine")
    there = f"hostname; cat {tmp_path}/shared; ls /mnt; ps -e | grep -c slurmd"
    assert lab.run("host1", "ssh", "host2", there).stdout.split() == ["host2", "seen", "1"]
    assert lab.run("host3", "ssh", "host1", there).stdout.split() == ["host1", "seen", "mine", "1"]


def test_a_link_can_be_taken_down(lab: Lab) -> None:
    """The host is gone for the others, and there again."""
    ping = ("timeout", "2", "ssh", "-o", "ConnectTimeout=1", "host3", "true")
    lab.link("host3", up=False)
    try:
        assert lab.run(LOGIN, *ping).returncode != 0
    finally:
        lab.link("host3", up=True)
    assert lab.run(LOGIN, *ping).returncode == 0


def test_slurm_starts_ranks_on_its_hosts(lab: Lab) -> None:
    """Two tasks on the first and one on the second."""
    told = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $(hostname) $SLURM_STEP_TASKS_PER_NODE"
    ended = lab.run(LOGIN, "srun", "--nodes=2", "--ntasks=3", "sh", "-c", told)
    assert sorted(ended.stdout.splitlines()) == [
        "0 0 0 host1 2,1",
        "1 1 0 host1 2,1",
        "2 0 1 host2 2,1",
    ]


def test_a_lab_that_crashes_leaves_no_process(lab: Lab) -> None:
    """SIGKILL to its maker ends its hosts; the next lab takes its folder away."""
    command = [sys.executable, "-m", "tests.cluster.lab", "1", "sh", "-c", "echo up; sleep 1000"]
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    while maker.stdout.readline() != "up\n":
        assert maker.poll() is None
    folder = lab.folder.with_name(f"ortlaunch-lab-{maker.pid}")
    maker.kill()
    maker.wait()
    deadline = time.monotonic() + 5
    while left := _mentioning(str(folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    subprocess.run([*command[:-3], "true"], check=True, timeout=30, capture_output=True)
    assert not folder.exists()


def _mentioning(text: str) -> list[str]:
    """Command lines of living processes that name it."""
    lines = subprocess.run(
        ["ps", "-eo", "args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if text in line]

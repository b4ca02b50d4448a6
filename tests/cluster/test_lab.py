"""The lab itself: shared and private folders, links, Slurm's ranks, and clean-up after a crash."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.lab import LOGIN, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_hosts_reach_each_other_and_share_one_disk_of_two(lab: Lab, tmp_path: Path) -> None:
    """Hosts reach each other by ssh; only /mnt and the processes are private to a host."""
    (tmp_path / "shared").write_text("seen\n")
    lab.run("host1", "touch", "/mnt/mine")
    there = f"hostname; cat {tmp_path}/shared; ls /mnt; ps -e | grep -c slurmd"
    assert lab.run("host1", "ssh", "host2", there).stdout.split() == ["host2", "seen", "1"]
    assert lab.run("host3", "ssh", "host1", there).stdout.split() == ["host1", "seen", "mine", "1"]


def test_a_link_can_be_taken_down(lab: Lab) -> None:
    """A host whose link is down is unreachable, and reachable again when it is up."""
    ping = ("timeout", "2", "ssh", "-o", "ConnectTimeout=1", "host3", "true")
    lab.link("host3", up=False)
    try:
        assert lab.run(LOGIN, *ping).returncode != 0
    finally:
        lab.link("host3", up=True)
    assert lab.run(LOGIN, *ping).returncode == 0


def test_slurm_starts_ranks_on_its_hosts(lab: Lab) -> None:
    """srun starts two of three tasks on the first host and one on the second."""
    told = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $(hostname) $SLURM_STEP_TASKS_PER_NODE"
    ended = lab.run(LOGIN, "srun", "--nodes=2", "--ntasks=3", "sh", "-c", told)
    assert sorted(ended.stdout.splitlines()) == [
        "0 0 0 host1 2,1",
        "1 1 0 host1 2,1",
        "2 0 1 host2 2,1",
    ]


def test_a_lab_that_crashes_leaves_no_process(lab: Lab) -> None:
    """SIGKILL to a lab's maker ends its hosts; the next lab removes its folder."""
    command = [sys.executable, "-m", "tests.cluster.lab", "1", "sh", "-c", "echo up; sleep 1000"]
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    while maker.stdout.readline() != "up\n":
        assert maker.poll() is None
    folder = lab.folder.with_name(f"ortlaunch-lab-{maker.pid}")
    maker.kill()
    # Its hosts may hold the pipe, so that this end is closed first.
    maker.stdout.close()
    maker.wait()
    # The kernel ends the hosts asynchronously.
    deadline = time.monotonic() + 5
    while left := _mentioning(str(folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    # Another lab removes stale folders when it starts.
    subprocess.run([*command[:-3], "true"], check=True, timeout=30, capture_output=True)
    assert not folder.exists()


def _mentioning(text: str) -> list[str]:
    """Return the command lines of living processes that contain the text."""
    lines = subprocess.run(
        ["ps", "-eo", "args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if text in line]

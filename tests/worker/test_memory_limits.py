"""Limits of memory as the kernel writes them, on files made for the test and on this machine's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortlaunch.machine import control_groups
from ortlaunch.worker import memory_limits
from ortlaunch.worker.memory_limits import Room

GiB = 1 << 30


def group(folder: Path, version: int, limit: str, used: int, cache: int) -> None:
    """A control group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]  # fmt: skip
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def groups(folder: Path, line: str) -> list[int]:
    """Bytes left by every limit that a process with this line in /proc/self/cgroup has."""
    (folder / "proc/self").mkdir(parents=True, exist_ok=True)
    (folder / "proc/self/cgroup").write_text(f"3:cpu:/\n{line}\n")
    return [group.left for group in control_groups(folder / "proc", folder / "sys")]


def test_version_2_and_every_group_above(tmp_path: Path) -> None:
    """A limit of a parent counts too; `max` is none; page cache can be dropped."""
    group(tmp_path / "sys/job/step", 2, str(4 * GiB), 1 * GiB, GiB // 2)
    group(tmp_path / "sys/job", 2, str(8 * GiB), 6 * GiB, 0)
    group(tmp_path / "sys", 2, "max", 6 * GiB, 0)
    assert groups(tmp_path, "0::/job/step") == [3 * GiB + GiB // 2, 2 * GiB]


def test_version_1(tmp_path: Path) -> None:
    """Version 1 writes nearly 2^63 where there is no limit."""
    group(tmp_path / "sys/memory/job", 1, str(4 * GiB), 1 * GiB, 0)
    group(tmp_path / "sys/memory", 1, str((1 << 63) - 4096), 1 * GiB, 0)
    assert groups(tmp_path, "4:memory:/job") == [3 * GiB]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """The path in /proc may be the host's, which is not there."""
    group(tmp_path / "sys", 2, str(2 * GiB), 1 * GiB, 0)
    assert groups(tmp_path, "0::/docker/0123") == [1 * GiB]


def test_a_full_group_has_nothing_left(tmp_path: Path) -> None:
    """Usage can stand above the limit for a moment."""
    group(tmp_path / "sys", 2, str(GiB), 2 * GiB, 0)
    assert groups(tmp_path, "0::/") == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_machine_is_shared_by_its_ranks() -> None:
    """Two ranks of a host may take half each."""
    alone, shared = (Room(torch.device("cpu"), ranks).limits[0] for ranks in (1, 2))
    assert shared.room == pytest.approx(alone.room / 2, rel=0.1)
    assert 0 < alone.room <= memory_limits._sizes(Path("/proc/meminfo"))["MemTotal"]


TAKES = """
import resource, sys, torch
from ortlaunch.worker.memory_limits import Room, status
if sys.argv[1] == "RLIMIT_AS":
    limit = status("VmSize") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
room = Room(torch.device("cpu"), 1)
taken = torch.ones(200 << 18)
del taken
share, limit = room.fullest()
print(limit.name, limit.taken() >> 20, share)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_taken_counts_after_it_is_gone() -> None:
    """200 MiB of a 1 GiB address space, at the peak; the limit that is nearest is named."""
    done = subprocess.run(
        [sys.executable, "-c", TAKES, "RLIMIT_AS"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    name, taken, share = done.stdout.split()
    assert name == "RLIMIT_AS"
    assert 200 <= int(taken) < 400
    assert 0.19 < float(share) < 0.4

"""What the kernel tells of this machine, read from files as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch import machine

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 5\noom 2\noom_kill {}\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("4:memory:/job/7\n0::/\n", "memory/job/7/memory.oom_control", V1),
        ("4:cpu,memory:/docker/ab\n", "memory/memory.oom_control", V1),
        ("0::/job/7\n", "job/7/memory.events", V2),
        ("4:cpu:/\n0::/job\n", "unified/job/memory.events", V2),
        ("0::/\n", "memory.events", V2),
    ],
)
def test_the_kernels_count_of_kills_for_memory(groups: str, file: str, text: str, tmp_path: Path) -> None:
    """This control group's own count, version 1 and 2, and in a container, whose root is the group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert machine.oom_kills(tmp_path / "proc", tmp_path / "groups") is None
    path = tmp_path / "groups" / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(3))
    assert machine.oom_kills(tmp_path / "proc", tmp_path / "groups") == 3

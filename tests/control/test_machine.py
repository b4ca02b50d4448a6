"""Memory limits, cores, GPUs and memory kills, read from files in the kernel's formats."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ortlaunch.base import machine
from tests.kernel_files import GiB, KernelFiles

# memory.oom_control of control groups version 1, and memory.events of version 2.
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 5\noom 2\noom_kill {}\noom_group_kill 0\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelFiles:
    """A machine with 24 GiB of memory and no control groups yet."""
    return KernelFiles(tmp_path, monkeypatch)


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
def test_the_kernels_count_of_kills_for_memory(
    groups: str, file: str, text: str, kernel: KernelFiles
) -> None:
    """The count comes from this process's own group, also in a container, where it is the root."""
    kernel.cgroup.write_text(groups)
    assert machine.memory_kill_count_of_control_group() is None
    path = kernel.groups / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(3))
    assert machine.memory_kill_count_of_control_group() == 3


def groups() -> list[int]:
    """Return the free bytes of every control group that limits this process."""
    return [limit.free_bytes for limit in machine.machine_and_control_group_memory_limits()[1:]]


def test_version_2_and_every_group_above(kernel: KernelFiles) -> None:
    """A parent's limit counts, `max` is no limit, and page cache counts as free."""
    kernel.memory("job/step", 2, 4 * GiB, 1 * GiB, GiB // 2)
    kernel.memory("job", 2, 8 * GiB, 6 * GiB)
    kernel.memory("", 2, None, 6 * GiB)
    kernel.process_in("0::/job/step")
    assert groups() == [3 * GiB + GiB // 2, 2 * GiB]


def test_version_1(kernel: KernelFiles) -> None:
    """A value near 2^63, which version 1 writes for no limit, is ignored."""
    kernel.memory("memory/job", 1, 4 * GiB, 1 * GiB)
    kernel.memory("memory", 1, None, 1 * GiB)
    kernel.process_in("4:memory:/job")
    assert groups() == [3 * GiB]


def test_a_container_sees_its_own_group_as_the_root(kernel: KernelFiles) -> None:
    """The root group is used where the path in /proc is the host's and does not exist here."""
    kernel.memory("", 2, 2 * GiB, 1 * GiB)
    kernel.process_in("0::/docker/0123")
    assert groups() == [1 * GiB]


def test_a_full_group_has_nothing_left(kernel: KernelFiles) -> None:
    """Free memory is 0, not negative, while usage is above the limit."""
    kernel.memory("", 2, GiB, 2 * GiB)
    kernel.process_in("0::/")
    assert groups() == [0]


@pytest.mark.parametrize(
    ("version", "folder", "line"),
    [(1, "memory/slurm/job", "4:memory:/slurm/job/step"), (2, "slurm/job", "0::/slurm/job/step")],
)
def test_the_tightest_limit_is_a_group_above(
    version: int, folder: str, line: str, kernel: KernelFiles
) -> None:
    """The limit of a Slurm job applies to a process in its step's group, which has no limit."""
    kernel.memory(f"{folder}/step", version, None, 0)
    kernel.memory(folder, version, 2 * GiB, GiB // 2)
    kernel.process_in(line)
    found = machine.MemoryLimit(f"control group {kernel.groups / folder}", 2 * GiB, 3 * GiB // 2)
    assert (machine.smallest_memory_limit(), machine.memory_limit_with_least_free()) == (
        found,
        found,
    )


def test_a_busy_machine_leaves_less_than_a_group(kernel: KernelFiles) -> None:
    """The smallest limit and the limit with the least free memory can differ."""
    kernel.memory("job", 2, 20 * GiB, 0)
    kernel.process_in("0::/job")
    assert machine.smallest_memory_limit().total_bytes == 20 * GiB
    assert machine.memory_limit_with_least_free() == machine.MemoryLimit(
        "the memory of this machine", 24 * GiB, 16 * GiB
    )


def test_a_machine_without_control_groups(kernel: KernelFiles) -> None:
    """Without control groups the memory of the machine is the only limit."""
    assert [limit.total_bytes for limit in machine.machine_and_control_group_memory_limits()] == [
        24 * GiB
    ]


# (device files, CUDA_VISIBLE_DEVICES, GPUs that CUDA shows)
GPU_CASES = [
    (0, None, 0),
    (2, None, 2),
    (8, "", 0),
    (8, "-1", 0),
    (8, "0", 1),
    (8, "2,3", 2),
    (8, " 2 , 3 ", 2),
    (8, "0,-1,1", 1),
    (2, "0,5", 1),
    (2, "5,0", 0),
    (2, "GPU-8932f937,GPU-1122aabb", 2),
    (1, "MIG-1,MIG-2", 2),
    (0, "0,1", 0),
    # Slurm's of a job without GPUs, a word of other tools, a GPU that is named twice.
    (4, "NoDevFiles", 0),
    (4, "all", 0),
    (4, "0,0", 0),
    (4, "0,x,1", 1),
]


@pytest.mark.parametrize(("present", "chosen", "visible"), GPU_CASES)
def test_visible_gpus(
    present: int, chosen: str | None, visible: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are the device files that CUDA_VISIBLE_DEVICES shows, up to its first wrong name."""
    for name in (
        *(f"nvidia{i}" for i in range(present)),
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-modeset",
        "sda",
    ):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert machine.visible_gpu_count(environ) == visible


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n"}, 2),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        (
            "2:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "2:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        (
            "2:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "1200000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores_are_what_a_control_group_gives_time_for(
    line: str,
    files: dict[str, str],
    cores: int,
    kernel: KernelFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quota of this group or a parent limits the eight cores; half a core is rounded up."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    kernel.process_in(line)
    for name, text in files.items():
        path = kernel.groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.usable_core_count() == cores


@pytest.mark.parametrize(("age", "pid", "found"), [(1, 77, True), (1, 7, False), (3600, 77, False)])
def test_the_kernels_log_names_who_was_ended_for_memory(
    age: float, pid: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log line is found for this process only, and not if it is old."""
    said = "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB"
    log = tmp_path / "kmsg"
    # A process number is reused: an old line can be about an earlier process.
    log.write_text(f"3,1,{int((time.monotonic() - age) * 1e6)},-;{said}\n SUBSYSTEM=memory\n")
    monkeypatch.setattr(machine, "KERNEL_LOG", log)
    assert machine.kernel_memory_kill_message_or_none(pid) == (said if found else None)
    monkeypatch.setattr(machine, "KERNEL_LOG", tmp_path / "absent")
    assert machine.kernel_memory_kill_message_or_none(pid) is None

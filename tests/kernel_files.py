"""Files of the kernel about memory and control groups, written by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base import machine

GiB = 1 << 30
# By version of control groups: limit, usage, and the field of reclaimable page cache.
NAMES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
         2: ("memory.max", "memory.current", "inactive_file")}  # fmt: skip
# Text in the limit's file of a group without a limit.
NO_LIMIT = {1: str((1 << 63) - 4096), 2: "max"}


class KernelFiles:
    """A folder with /proc and /sys/fs/cgroup of a machine with 24 GiB, 16 of them available."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups = folder / "sys"
        (folder / "proc/self").mkdir(parents=True)
        self.cgroup = folder / "proc/self/cgroup"
        kib = GiB // 1024
        (folder / "proc/meminfo").write_text(
            f"MemTotal:  {24 * kib} kB\nMemFree: 1 kB\nMemAvailable: {16 * kib} kB\n"
        )
        monkeypatch.setattr(machine, "PROC", folder / "proc")
        monkeypatch.setattr(machine, "CONTROL_GROUPS", self.groups)

    def process_in(self, line: str) -> None:
        """Put this process into a control group by a line of /proc/self/cgroup."""
        self.cgroup.write_text(f"3:devices:/\n{line.strip()}\n")

    def memory(self, path: str, version: int, limit: int | None, used: int, cache: int = 0) -> None:
        """Write the files of a control group; sizes in bytes, None is no limit."""
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        most, usage, inactive = NAMES[version]
        (folder / most).write_text(f"{NO_LIMIT[version] if limit is None else limit}\n")
        (folder / usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{inactive} {cache}\n")

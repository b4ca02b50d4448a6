"""What this machine is, and whether it is busy with something else; read from /proc. Standard library only."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_WATCH_SECONDS = 0.5
_BUSY_SHARE = 0.1  # of one core


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, and the GPUs that the NVIDIA driver names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": _processor(), "cores": cores, "gpus": _gpus()}


def _processor() -> str:
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def matrix_units() -> list[str]:
    """The units for bfloat16 products that this processor names: amx_bf16, avx512_bf16."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return sorted({"amx_bf16", "avx512_bf16"}.intersection(flags[1].split() if flags else ()))
    return []


def without_matrix_unit(precision: str) -> str | None:
    """Why this processor computes float32 products no faster at this precision; None where it has the unit.

    Seen with torch 2.13: oneDNN takes bfloat16 inside float32 products on AMX alone, and TensorFloat32 nowhere.
    """
    units = matrix_units()
    if precision == "medium" and "amx_bf16" in units:
        return None
    if precision == "high":
        return "torch has no TensorFloat32 products on a CPU"
    return f"this processor has {', '.join(units) or 'no bf16 unit'}, and float32 products can use amx_bf16 alone"


def matmul_effect(precision: str, device: str) -> str:
    """What `engine.matmul_precision` below highest brings on a host like this one, for a plan."""
    if device == "cuda":
        return "products of float32 matrices in TensorFloat32, on a GPU that has it (Ampere and newer)"
    nothing = without_matrix_unit(precision)
    return f"gains nothing: {nothing}" if nothing else "products of float32 matrices in bfloat16, by amx_bf16"


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        named = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        found.append(named[1].strip() if named else "unknown")
    return found


class Group(NamedTuple):
    """A control group's limit of memory and what its processes use of it, in bytes."""

    name: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def control_groups(proc: Path = _PROC, root: Path = _GROUPS) -> Iterator[Group]:
    """Every control group with a limit that this process is in, version 1 and 2."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            names = ("memory.max", "memory.current", "inactive_file")
            tops = [root, root / "unified"]
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            tops = [root / "memory"]
        else:
            continue
        for top in tops:
            # In a container the path may be the host's: its own group is then the root here.
            for folder in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
                if folder.is_relative_to(top):
                    yield from _limited(folder, *names)


def _limited(folder: Path, most: str, used: str, cache: str) -> Iterator[Group]:
    """A group, if it has a limit; page cache that the kernel can drop does not count as used."""
    try:
        limit, usage = (folder / most).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if limit != "max" and int(limit) < 1 << 60:  # version 1 writes nearly 2^63 for none
        yield Group(f"control group {folder}", int(limit), usage - int(stat.get(cache, 0)))


def most_memory() -> tuple[str, int]:
    """The nearest limit of what all processes of a run can hold here: the machine's memory, or a control group's."""
    machine = ("the memory of this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError):
        return min([machine, *((group.name, group.limit) for group in control_groups())], key=lambda found: found[1])
    return machine


def free_memory() -> int | None:
    """Bytes that new processes could take without swapping; None where the kernel does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def oom_kills(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes of this one's control group that the kernel has ended for memory; None where it does not say."""
    for folder, name in _memory_groups(proc, root):
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def _memory_groups(proc: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """This process's control group and the file that counts there, version 1 and 2; in a container the root is it."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                yield from ((root / "memory" / inner, "memory.oom_control") for inner in (path.lstrip("/"), ""))
            elif kinds == "":
                tops = (root, root / "unified")
                yield from ((top / inner, "memory.events") for inner in (path.lstrip("/"), "") for top in tops)


def others_at_work() -> list[str]:
    """`name (pid): share of a core` of every process that works now, this one apart; the busiest first."""
    before, begun = dict(_ticks()), time.perf_counter()
    time.sleep(_WATCH_SECONDS)
    passed = (time.perf_counter() - begun) * os.sysconf("SC_CLK_TCK")
    shares = [((used - before.get(who, used)) / passed, who) for who, used in _ticks()]
    busy = sorted(((share, who) for share, who in shares if share >= _BUSY_SHARE), reverse=True)
    return [f"{name} ({pid}): {share:.0%} of a core" for share, (pid, name) in busy]


def _ticks() -> Iterator[tuple[tuple[int, str], int]]:
    """((pid, name), processor time in ticks) of every process but this one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            head, _, tail = path.read_text(errors="replace").rpartition(")")
            pid, _, name = head.partition(" (")
            if int(pid) != os.getpid():
                yield (int(pid), name), sum(map(int, tail.split()[11:13]))

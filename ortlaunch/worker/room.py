"""How much memory a rank may still take, by whichever limit is the nearest, and how much of it was taken.

On CPU: what the machine and this process's control groups have left, shared among the ranks of the host, and the
process's own RLIMIT_AS and RLIMIT_DATA. On CUDA: what is free on the GPU.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """One limit: how much room it left when it was looked at, and a function for what has been taken since."""

    name: str
    room: int
    taken: Callable[[], int]


class Room:
    """The limits of one rank, from the moment that this is made (all ranks of a host at once)."""

    def __init__(self, device: torch.device, ranks_on_host: int) -> None:
        self.limits = [_gpu(device)] if device.type == "cuda" else list(_host(ranks_on_host))

    def fullest(self) -> tuple[float, Limit]:
        """The share of its room, at the peak, of the limit that is the nearest."""
        return max(((limit.taken() / max(1, limit.room), limit) for limit in self.limits), key=lambda pair: pair[0])


def _gpu(device: torch.device) -> Limit:
    free, _ = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_reserved(device)
    return Limit(f"GPU {device.index}", free, lambda: torch.cuda.max_memory_reserved(device) - before)


def _host(ranks: int) -> Iterator[Limit]:
    resident, virtual = status("VmRSS"), status("VmSize")
    for name, left in (("memory of the machine", _available()), *control_groups()):
        yield Limit(name, left // ranks, lambda: status("VmHWM") - resident)
    for name, kind, now, taken in (
        ("RLIMIT_AS", resource.RLIMIT_AS, virtual, lambda: status("VmPeak") - virtual),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, status("VmData"), lambda: status("VmHWM") - resident),
    ):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield Limit(name, most - now, taken)


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    return _sizes(_PROC / "self/status")[name]


def _available() -> int:
    return _sizes(_PROC / "meminfo")["MemAvailable"]


def _sizes(path: Path) -> dict[str, int]:
    """`Name:  12 kB` -> bytes by name."""
    pairs = (line.split() for line in path.read_text().splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs}


def control_groups(proc: Path = _PROC, root: Path = _GROUPS) -> Iterator[tuple[str, int]]:
    """(name, bytes left) of every control group with a limit that this process is in, version 1 and 2."""
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
                    yield from _left(folder, *names)


def _left(folder: Path, most: str, used: str, cache: str) -> Iterator[tuple[str, int]]:
    """What a group has left; page cache that the kernel can drop does not count as used."""
    try:
        limit, usage = (folder / most).read_text().strip(), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if limit != "max" and int(limit) < 1 << 60:  # version 1 writes nearly 2^63 for none
        yield f"control group {folder}", max(0, int(limit) - usage + int(stat.get(cache, 0)))

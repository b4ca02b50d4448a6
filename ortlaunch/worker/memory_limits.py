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

from ortlaunch.machine import control_groups

_PROC = Path("/proc")


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
    groups = ((group.name, group.left) for group in control_groups())
    for name, left in (("memory of the machine", _available()), *groups):
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

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

from ortlaunch import machine

STATUS = Path("/proc/self/status")


class Limit(NamedTuple):
    """One limit: its size, what it left to this rank when it was looked at, and what has been taken since."""

    name: str
    size: int
    free: int
    taken: Callable[[], int]


class RankLimits:
    """The limits of one rank, from the moment that this is made (all ranks of a host at once)."""

    def __init__(self, device: torch.device, ranks_on_host: int) -> None:
        self.limits = [_gpu(device)] if device.type == "cuda" else list(_host(ranks_on_host))

    def tightest(self) -> tuple[float, Limit]:
        """The limit that came nearest to its end, and the share of what it had left that was taken at the peak."""
        return max(
            ((limit.taken() / max(1, limit.free), limit) for limit in self.limits),
            key=lambda pair: pair[0],
        )


def _gpu(device: torch.device) -> Limit:
    free, size = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_reserved(device)
    return Limit(
        f"GPU {device.index}", size, free, lambda: torch.cuda.max_memory_reserved(device) - before
    )


def _host(ranks: int) -> Iterator[Limit]:
    resident = status("VmRSS")
    virtual = status("VmSize")
    for limit in machine.memory_limits():
        yield Limit(limit.name, limit.size, limit.free // ranks, lambda: status("VmHWM") - resident)
    for name, kind, now, taken in (
        ("RLIMIT_AS", resource.RLIMIT_AS, virtual, lambda: status("VmPeak") - virtual),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, status("VmData"), lambda: status("VmHWM") - resident),
    ):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield Limit(name, most, most - now, taken)


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024

"""Memory limits of a rank, and how much of each the rank has used since they were read.

On CUDA the limit is the free memory of the GPU. On a CPU there are several: the free memory of the
machine and of the process's control groups, each divided by the number of ranks on the host, and
the RLIMIT_AS and RLIMIT_DATA of the process.
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
    """One memory limit of a rank, in bytes."""

    name: str
    size: int
    free: int
    """This rank's share of the free memory when the limit was read."""
    taken: Callable[[], int]
    """Returns the most memory that the rank has used since that reading."""


class RankLimits:
    """The limits of one rank; memory counts as used from the creation of this object on."""

    def __init__(self, device: torch.device, ranks_on_host: int) -> None:
        # The ranks of a host must do this at the same time, because each gets an equal share of the
        # memory that is free then.
        self.limits = [_gpu(device)] if device.type == "cuda" else list(_host(ranks_on_host))

    def tightest(self) -> tuple[float, Limit]:
        """Return the limit of which the rank used the largest share at its peak, with that share.

        A share is 1 if the rank used all memory that was free at the start.
        """
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
        yield Limit(
            limit.name,
            limit.total_bytes,
            limit.free_bytes // ranks,
            lambda: status("VmHWM") - resident,
        )
    for name, kind, now, taken in (
        ("RLIMIT_AS", resource.RLIMIT_AS, virtual, lambda: status("VmPeak") - virtual),
        # The kernel keeps no peak of VmData: the growth of resident memory is used instead.
        ("RLIMIT_DATA", resource.RLIMIT_DATA, status("VmData"), lambda: status("VmHWM") - resident),
    ):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield Limit(name, most, most - now, taken)


def status(name: str) -> int:
    """Return a size of /proc/self/status, in bytes."""
    # The file gives sizes in KiB.
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024

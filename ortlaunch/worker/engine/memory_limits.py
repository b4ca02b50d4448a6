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

from ortlaunch.base import machine

STATUS_FILE = Path("/proc/self/status")


class RankMemoryLimit(NamedTuple):
    """One memory limit of a rank, in bytes."""

    name: str
    size: int
    free: int
    """This rank's share of the free memory when the limit was read."""
    used_bytes: Callable[[], int]
    """Returns the most memory that the rank has used since that reading."""


class RankMemoryLimits:
    """The limits of one rank; memory counts as used from the creation of this object on."""

    def __init__(self, device: torch.device, ranks_on_host: int) -> None:
        # The ranks of a host must do this at the same time, because each gets an equal share of the
        # memory that is free then.
        self.limits = (
            [_gpu_memory_limit(device)]
            if device.type == "cuda"
            else list(_host_and_process_memory_limits(ranks_on_host))
        )

    def used_fraction_and_tightest_limit(self) -> tuple[float, RankMemoryLimit]:
        """Return the limit of which the rank used the largest share at its peak, with that share.

        A share is 1 if the rank used all memory that was free at the start.
        """
        return max(
            ((limit.used_bytes() / max(1, limit.free), limit) for limit in self.limits),
            key=lambda pair: pair[0],
        )


def _gpu_memory_limit(device: torch.device) -> RankMemoryLimit:
    free, size = torch.cuda.mem_get_info(device)
    reserved_before = torch.cuda.memory_reserved(device)
    return RankMemoryLimit(
        f"GPU {device.index}",
        size,
        free,
        lambda: torch.cuda.max_memory_reserved(device) - reserved_before,
    )


def _host_and_process_memory_limits(ranks_on_host: int) -> Iterator[RankMemoryLimit]:
    resident = process_status_bytes("VmRSS")
    virtual = process_status_bytes("VmSize")
    for limit in machine.machine_and_control_group_memory_limits():
        yield RankMemoryLimit(
            limit.name,
            limit.total_bytes,
            limit.free_bytes // ranks_on_host,
            lambda: process_status_bytes("VmHWM") - resident,
        )
    for name, limit_type, current_bytes, used_bytes in (
        (
            "RLIMIT_AS",
            resource.RLIMIT_AS,
            virtual,
            lambda: process_status_bytes("VmPeak") - virtual,
        ),
        # The kernel keeps no peak of VmData: the growth of resident memory is used instead.
        (
            "RLIMIT_DATA",
            resource.RLIMIT_DATA,
            process_status_bytes("VmData"),
            lambda: process_status_bytes("VmHWM") - resident,
        ),
    ):
        limit_bytes = resource.getrlimit(limit_type)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            yield RankMemoryLimit(name, limit_bytes, limit_bytes - current_bytes, used_bytes)


def process_status_bytes(field_name: str) -> int:
    """Return a size of /proc/self/status, in bytes."""
    # The file gives sizes in KiB.
    line = next(
        line for line in STATUS_FILE.read_text().splitlines() if line.startswith(f"{field_name}:")
    )
    return int(line.split()[1]) * 1024

"""`ortlaunch selftest`: measurements of the ranks' compute rate and communication.

The control side judges the results. An all-reduce is as slow as its slowest rank. Therefore the
links of each host to its neighbours are measured, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.engine.flops import measured_peak_flops, wait_for
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

# Repetitions of a small message.
_REPEATS = 20
# Sizes are in elements of 4 bytes. The first message determines the size of the large one.
_SMALL = 1
_FIRST = 1 << 18
_MOST = {"cpu": 1 << 23, "cuda": 1 << 26}
# The most time for one large message.
_SECONDS = 0.3


def run(session: Session) -> None:
    """Measure all; rank 0 writes the results."""
    group = session.group
    group.barrier()
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    rates = group.gather_numbers([measured_peak_flops(group.device, dtype)])
    found: dict[str, object] = {
        "dtype": str(dtype).rpartition(".")[2],
        "flops": [rate for (rate,) in rates],
    }
    if group.size > 1:
        found["all_reduce"] = _all_reduce(group)
        found["links"] = _links(group, [node.first_rank for node in session.plan.nodes])
    if group.rank == 0:
        write_json_atomically(session.run.fabric, found)


def _all_reduce(group: DistributedContext) -> dict[str, float]:
    """Return the seconds of a small and of a large all-reduce, and the bytes of the large one."""

    def send(elements: int) -> Callable[[], None]:
        data = torch.ones(elements, device=group.device)

        def action() -> None:
            dist.all_reduce(data)

        return action

    latency = _median(group, send(_SMALL), _REPEATS)
    elements = _fitting(group, _median(group, send(_FIRST), 1))
    return {"latency": latency, "bytes": 4 * elements, "seconds": _median(group, send(elements), 3)}


def _links(group: DistributedContext, firsts: list[int]) -> list[dict[str, float]]:
    """Measure the links between the first ranks of neighbouring hosts.

    The hosts form a ring. Links that share no host are measured at the same time.
    """
    hosts = len(firsts)
    found = []
    pairs = [(number, (number + 1) % hosts) for number in range(hosts if hosts > 2 else hosts - 1)]
    # In a ring of an odd number of hosts the last link would share a host with the first one.
    last = [pairs.pop()] if len(pairs) > 1 and hosts % 2 else []
    for together in filter(None, (pairs[::2], pairs[1::2], last)):
        mine = next(
            (pair for pair in together if group.rank in (firsts[pair[0]], firsts[pair[1]])), None
        )
        group.barrier()
        told = _link(group, firsts[mine[0]], firsts[mine[1]]) if mine else None
        measured = group.gather(told)
        found += [{"hosts": list(pair), **measured[firsts[pair[0]]]} for pair in together]
    return found


def _link(group: DistributedContext, first: int, second: int) -> dict[str, float]:
    """Measure a small and a large message between two ranks, in one direction."""
    other = second if group.rank == first else first

    def send(elements: int) -> Callable[[], None]:
        data = torch.ones(elements, device=group.device)

        def to_and_fro() -> None:
            for sender in (first, second):
                (dist.send if group.rank == sender else dist.recv)(data, other)

        return to_and_fro

    # Each action sends to and fro: half of its time is one direction.
    latency = _alone(group, send(_SMALL), _REPEATS) / 2
    once = _alone(group, send(_FIRST), 1)
    size = torch.tensor([float(_elements(group, once))], device=group.device)
    # Both must use one size, but each has measured its own time: the first one decides.
    if group.rank == first:
        dist.send(size, other)
    else:
        dist.recv(size, other)
    elements = int(size)
    return {
        "latency": latency,
        "bytes": 4 * elements,
        "seconds": _alone(group, send(elements), 3) / 2,
    }


def _alone(group: DistributedContext, action: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of an action on this rank, after one run to warm up."""
    took = []
    for _ in range(repeats + 1):
        wait_for(group.device)
        began = time.perf_counter()
        action()
        wait_for(group.device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _median(group: DistributedContext, action: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of an action on the slowest rank (collective)."""
    return max(seconds for (seconds,) in group.gather_numbers([_alone(group, action, repeats)]))


def _fitting(group: DistributedContext, seconds: float) -> int:
    """Return the number of elements that fits into the time, the same on all ranks (collective)."""
    return int(group.gather_numbers([_elements(group, seconds)])[0][0])


def _elements(group: DistributedContext, seconds: float) -> int:
    return max(1, min(_MOST[group.device.type], int(_FIRST * _SECONDS / max(seconds, 1e-6))))

"""`ortlaunch doctor`: measurements of the ranks' compute rate and communication.

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
from ortlaunch.worker.engine.flops import measure_peak_flops_per_second, wait_for_device
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

# Repetitions of a small message.
_REPEATS = 20
# Sizes are in elements of 4 bytes. The first message determines the size of the large one.
_SMALL_ELEMENTS = 1
_FIRST_ELEMENTS = 1 << 18
_MAX_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
# The most time for one large message.
_MAX_SECONDS = 0.3


def run(session: Session) -> None:
    """Measure all; rank 0 writes the results."""
    group = session.group
    group.barrier()
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    rates = group.gather_numbers([measure_peak_flops_per_second(group.device, dtype)])
    measurements: dict[str, object] = {
        "dtype": str(dtype).rpartition(".")[2],
        "flops": [rate for (rate,) in rates],
    }
    if group.size > 1:
        measurements["all_reduce"] = _measure_small_and_large_all_reduce(group)
        measurements["links"] = _measure_links_of_neighbour_hosts(
            group, [node.first_rank for node in session.plan.nodes]
        )
    if group.rank == 0:
        write_json_atomically(session.run.fabric, measurements)


def _measure_small_and_large_all_reduce(group: DistributedContext) -> dict[str, float]:
    """Return the seconds of a small and of a large all-reduce, and the bytes of the large one."""

    def all_reduce_action(elements: int) -> Callable[[], None]:
        data = torch.ones(elements, device=group.device)

        def action() -> None:
            dist.all_reduce(data)

        return action

    latency = _median_seconds_on_slowest_rank(group, all_reduce_action(_SMALL_ELEMENTS), _REPEATS)
    elements = _large_message_elements_by_rank_0(
        group, _median_seconds_on_slowest_rank(group, all_reduce_action(_FIRST_ELEMENTS), 1)
    )
    return {
        "latency": latency,
        "bytes": 4 * elements,
        "seconds": _median_seconds_on_slowest_rank(group, all_reduce_action(elements), 3),
    }


def _measure_links_of_neighbour_hosts(
    group: DistributedContext, first_rank_by_host: list[int]
) -> list[dict[str, float]]:
    """Measure the links between the first ranks of neighbouring hosts.

    The hosts form a ring. Links that share no host are measured at the same time.
    """
    host_count = len(first_rank_by_host)
    links = []
    pairs = [
        (host_index, (host_index + 1) % host_count)
        for host_index in range(host_count if host_count > 2 else host_count - 1)
    ]
    # In a ring of an odd number of hosts the last link would share a host with the first one.
    last_pair = [pairs.pop()] if len(pairs) > 1 and host_count % 2 else []
    for concurrent_pairs in filter(None, (pairs[::2], pairs[1::2], last_pair)):
        own_pair = next(
            (
                pair
                for pair in concurrent_pairs
                if group.rank in (first_rank_by_host[pair[0]], first_rank_by_host[pair[1]])
            ),
            None,
        )
        group.barrier()
        own_measurement = (
            _measure_messages_between_ranks(
                group, first_rank_by_host[own_pair[0]], first_rank_by_host[own_pair[1]]
            )
            if own_pair
            else None
        )
        measurement_by_rank = group.gather(own_measurement)
        links += [
            {"hosts": list(pair), **measurement_by_rank[first_rank_by_host[pair[0]]]}
            for pair in concurrent_pairs
        ]
    return links


def _measure_messages_between_ranks(
    group: DistributedContext, first_rank: int, second_rank: int
) -> dict[str, float]:
    """Measure a small and a large message between two ranks, in one direction."""
    other_rank = second_rank if group.rank == first_rank else first_rank

    def ping_pong_action(elements: int) -> Callable[[], None]:
        data = torch.ones(elements, device=group.device)

        def send_both_ways() -> None:
            for sender in (first_rank, second_rank):
                (dist.send if group.rank == sender else dist.recv)(data, other_rank)

        return send_both_ways

    # Each action sends to and fro: half of its time is one direction.
    latency = _median_seconds_after_warm_up(group, ping_pong_action(_SMALL_ELEMENTS), _REPEATS) / 2
    first_message_seconds = _median_seconds_after_warm_up(
        group, ping_pong_action(_FIRST_ELEMENTS), 1
    )
    size = torch.tensor(
        [float(_large_message_elements(group, first_message_seconds))], device=group.device
    )
    # Both must use one size, but each has measured its own time: the first one decides.
    if group.rank == first_rank:
        dist.send(size, other_rank)
    else:
        dist.recv(size, other_rank)
    elements = int(size)
    return {
        "latency": latency,
        "bytes": 4 * elements,
        "seconds": _median_seconds_after_warm_up(group, ping_pong_action(elements), 3) / 2,
    }


def _median_seconds_after_warm_up(
    group: DistributedContext, timed_action: Callable[[], None], repeat_count: int
) -> float:
    """Return the median seconds of an action on this rank, after one run to warm up."""
    run_seconds = []
    for _ in range(repeat_count + 1):
        wait_for_device(group.device)
        began = time.perf_counter()
        timed_action()
        wait_for_device(group.device)
        run_seconds.append(time.perf_counter() - began)
    return statistics.median(run_seconds[1:])


def _median_seconds_on_slowest_rank(
    group: DistributedContext, timed_action: Callable[[], None], repeat_count: int
) -> float:
    """Return the median seconds of an action on the slowest rank (collective)."""
    return max(
        seconds
        for (seconds,) in group.gather_numbers(
            [_median_seconds_after_warm_up(group, timed_action, repeat_count)]
        )
    )


def _large_message_elements_by_rank_0(
    group: DistributedContext, first_message_seconds: float
) -> int:
    """Return the number of elements that fits into the time, the same on all ranks (collective)."""
    return int(group.gather_numbers([_large_message_elements(group, first_message_seconds)])[0][0])


def _large_message_elements(group: DistributedContext, first_message_seconds: float) -> int:
    return max(
        1,
        min(
            _MAX_ELEMENTS[group.device.type],
            int(_FIRST_ELEMENTS * _MAX_SECONDS / max(first_message_seconds, 1e-6)),
        ),
    )

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
        measurements["all_reduce"] = _measure_seconds_of_small_and_large_message(
            group,
            dist.all_reduce,
            # By the slowest rank.
            lambda seconds: max(
                rank_seconds for (rank_seconds,) in group.gather_numbers([seconds])
            ),
        )
        measurements["links"] = _measure_links_of_neighbour_hosts(
            group, [node.first_rank for node in session.plan.nodes]
        )
    if group.rank == 0:
        write_json_atomically(session.run.fabric, measurements)


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

    def send_both_ways(data: torch.Tensor, received: torch.Tensor) -> None:
        for sender in (first_rank, second_rank):
            if group.rank == sender:
                dist.send(data, other_rank)
            else:
                dist.recv(received, other_rank)

    def slower_of_both(seconds: float) -> float:
        own = torch.tensor([seconds], device=group.device)
        other = torch.zeros_like(own)
        send_both_ways(own, other)
        return max(float(own), float(other))

    both_ways = _measure_seconds_of_small_and_large_message(
        group, lambda data: send_both_ways(data, data), slower_of_both
    )
    return {
        "latency": both_ways["latency"] / 2,
        "bytes": both_ways["bytes"],
        "seconds": both_ways["seconds"] / 2,
    }


def _measure_seconds_of_small_and_large_message(
    group: DistributedContext,
    send: Callable[[torch.Tensor], object],
    agree_on_seconds: Callable[[float], float],
) -> dict[str, float]:
    """Return the seconds of a small and of a large message, and the bytes of the large one.

    Args:
        send: communicates a tensor.
        agree_on_seconds: returns one value for all ranks that communicate, which use one size.
    """

    def median_seconds(element_count: int, repeat_count: int) -> float:
        data = torch.ones(element_count, device=group.device)
        run_seconds = []
        # The first run warms up.
        for _ in range(repeat_count + 1):
            wait_for_device(group.device)
            start_seconds = time.perf_counter()
            send(data)
            wait_for_device(group.device)
            run_seconds.append(time.perf_counter() - start_seconds)
        return agree_on_seconds(statistics.median(run_seconds[1:]))

    latency = median_seconds(_SMALL_ELEMENTS, _REPEATS)
    first_message_seconds = max(median_seconds(_FIRST_ELEMENTS, 1), 1e-6)
    elements = int(_FIRST_ELEMENTS * _MAX_SECONDS / first_message_seconds)
    elements = max(1, min(_MAX_ELEMENTS[group.device.type], elements))
    return {"latency": latency, "bytes": 4 * elements, "seconds": median_seconds(elements, 3)}

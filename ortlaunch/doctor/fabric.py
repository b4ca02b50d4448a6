"""Judge measurements of ranks and links (worker/tasks/fabric.py); slow hosts are named. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortlaunch.doctor.finding import FAILED, OK, Finding, judged
from ortlaunch.launch_plan import Node
from ortlaunch.units import count_with_noun, human_bytes

# A host is slow below these shares of the median of all hosts.
_SLOW_RATE = 0.7
_SLOW_LINK = 0.5
# Or with a latency above 3 times the median plus 100 microseconds. In a fast network noise alone
# may be 3 times the median.
_LATE = 3.0
_LATE_SECONDS = 100e-6


def judge(measured: Mapping[str, Any], nodes: Sequence[Node]) -> list[Finding]:
    """Return findings: matmul rate of each host, links of each host, all-reduce of all ranks.

    Args:
        measured: rates in FLOP/s by rank, links, and the all-reduce, as the task wrote them.
        nodes: the hosts of the plan, in the order of their ranks.
    """
    return [
        *_rates(measured, nodes),
        *_links(measured.get("links", ()), nodes),
        *_all_reduce(measured, nodes),
    ]


def _rates(measured: Mapping[str, Any], nodes: Sequence[Node]) -> Iterator[Finding]:
    rates = measured["flops"]
    # median_high is a measured value; with two hosts it is the faster one, so a slow one shows.
    middle = statistics.median_high(measured["flops"])
    for node in nodes:
        own = rates[node.first_rank : node.first_rank + node.slots]
        slow = [
            node.first_rank + place for place, rate in enumerate(own) if rate < _SLOW_RATE * middle
        ]
        what = f"{_flops(min(own))} in {measured['dtype']}" + (
            f" to {_flops(max(own))}" if len(own) > 1 else ""
        )
        if slow:
            what = (
                f"SLOW: {what}, where {_flops(middle)} is the median (rank "
                f"{', '.join(map(str, slow))})"
            )
        mend = (
            "check other processes, clocks and power limits there (nvidia-smi -q -d "
            "PERFORMANCE), or --exclude it"
        )
        found = judged(node.host, "matrix rate", not slow, what, mend, else_=FAILED)
        yield _with(found, gflops_least=min(own) / 1e9, gflops_most=max(own) / 1e9)


def _links(links: Sequence[Mapping[str, Any]], nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield a finding for each host, by the better of its two links."""
    # The other link may be slow because of the neighbour.
    if not links:
        return
    rate = {host: max(_rate(link) for link in _of(host, links)) for host in range(len(nodes))}
    late = {host: min(link["latency"] for link in _of(host, links)) for host in range(len(nodes))}
    usual = statistics.median_high(rate.values())
    quick = statistics.median_low(late.values())
    for host, node in enumerate(nodes):
        said = ((f"to {nodes[_other(host, link)].host} {_per_second(_rate(link))} and "
                f"{_microseconds(link['latency'])}")
                for link in _of(host, links))  # fmt: skip
        slow = rate[host] < _SLOW_LINK * usual or late[host] > _LATE * quick + _LATE_SECONDS
        usually = (
            f", where {_per_second(usual)} and {_microseconds(quick)} are the median"
            if slow
            else ""
        )
        what = f"{'SLOW: ' if slow else ''}{', '.join(said)}{usually}"
        mend = (
            "check its cable, switch port and interface (ethtool, ibstat) and "
            "launch.interface, or --exclude it"
        )
        found = judged(node.host, "link", not slow, what, mend, else_=FAILED)
        yield _with(found, bytes_per_second=rate[host], latency_seconds=late[host])


def _all_reduce(measured: Mapping[str, Any], nodes: Sequence[Node]) -> Iterator[Finding]:
    found = measured.get("all_reduce")
    if found is None:
        return
    ranks = sum(node.slots for node in nodes)
    # Bus bandwidth as nccl-tests defines it: a ring sends each byte 2 (n - 1) / n times.
    bus = 2 * (ranks - 1) / ranks * found["bytes"] / found["seconds"]
    what = (
        f"{count_with_noun(ranks, 'rank')}: {_microseconds(found['latency'])} for 4 B, "
        f"{_per_second(bus)} on the bus for "
        f"{human_bytes(found['bytes'])}"
    )
    yield _with(
        Finding("all", "all-reduce", OK, what),
        bytes_per_second=bus,
        latency_seconds=found["latency"],
    )


def _of(host: int, links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [link for link in links if host in link["hosts"]]


def _other(host: int, link: Mapping[str, Any]) -> int:
    first, second = link["hosts"]
    return int(second if first == host else first)


def _rate(link: Mapping[str, Any]) -> float:
    return float(link["bytes"] / link["seconds"])


def _with(finding: Finding, **figures: float) -> Finding:
    finding.figures.update({name: float(f"{value:.4g}") for name, value in figures.items()})
    return finding


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GFLOP/s"


def _per_second(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"

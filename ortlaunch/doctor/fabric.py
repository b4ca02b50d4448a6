"""Judge measurements of ranks and links (worker/tasks/fabric.py); slow hosts are named. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortlaunch.base.units import count_with_noun, human_bytes
from ortlaunch.doctor.finding import FAILED, OK, Finding, finding_ok_or_with_remedy
from ortlaunch.launch_plan import Node

# A host is slow below these shares of the median of all hosts.
_SLOW_RATE_SHARE = 0.7
_SLOW_LINK_SHARE = 0.5
# Or with a latency above 3 times the median plus 100 microseconds. In a fast network noise alone
# may be 3 times the median.
_LATE_FACTOR = 3.0
_LATE_SECONDS = 100e-6


def findings_on_matmul_links_and_all_reduce(
    measurements: Mapping[str, Any], nodes: Sequence[Node]
) -> list[Finding]:
    """Return findings: matmul rate of each host, links of each host, all-reduce of all ranks.

    Args:
        measurements: rates in FLOP/s by rank, links, and the all-reduce, as the task wrote them.
        nodes: the hosts of the plan, in the order of their ranks.
    """
    return [
        *_matmul_finding_by_host_failed_if_a_rank_is_slow(measurements, nodes),
        *_network_link_finding_of_each_host(measurements.get("links", ()), nodes),
        *_all_reduce_speed_finding_if_measured(measurements, nodes),
    ]


def _matmul_finding_by_host_failed_if_a_rank_is_slow(
    measurements: Mapping[str, Any], nodes: Sequence[Node]
) -> Iterator[Finding]:
    rates = measurements["flops"]
    # median_high is a measured value; with two hosts it is the faster one, so a slow one shows.
    median_rate = statistics.median_high(measurements["flops"])
    for node in nodes:
        rates_of_host = rates[node.first_rank : node.first_rank + node.slots]
        slow_ranks = [
            node.first_rank + rank_index
            for rank_index, rate in enumerate(rates_of_host)
            if rate < _SLOW_RATE_SHARE * median_rate
        ]
        observation = f"{_flops_text(min(rates_of_host))} in {measurements['dtype']}" + (
            f" to {_flops_text(max(rates_of_host))}" if len(rates_of_host) > 1 else ""
        )
        if slow_ranks:
            observation = (
                f"SLOW: {observation}, where {_flops_text(median_rate)} is the median (rank "
                f"{', '.join(map(str, slow_ranks))})"
            )
        remedy = (
            "check other processes, clocks and power limits there (nvidia-smi -q -d "
            "PERFORMANCE), or --exclude it"
        )
        finding = finding_ok_or_with_remedy(
            node.host,
            "matrix rate",
            not slow_ranks,
            observation,
            remedy,
            verdict_if_not_good=FAILED,
        )
        yield _add_figures(
            finding, gflops_least=min(rates_of_host) / 1e9, gflops_most=max(rates_of_host) / 1e9
        )


def _network_link_finding_of_each_host(
    links: Sequence[Mapping[str, Any]], nodes: Sequence[Node]
) -> Iterator[Finding]:
    """Yield a finding for each host, by the better of its two links."""
    # The other link may be slow because of the neighbour.
    if not links:
        return
    rate_by_host = {
        host_index: max(_bytes_per_second(link) for link in _links_of_host(host_index, links))
        for host_index in range(len(nodes))
    }
    latency_by_host = {
        host_index: min(link["latency"] for link in _links_of_host(host_index, links))
        for host_index in range(len(nodes))
    }
    median_rate = statistics.median_high(rate_by_host.values())
    median_latency = statistics.median_low(latency_by_host.values())
    for host_index, node in enumerate(nodes):
        link_texts = ((f"to {nodes[_other_host(host_index, link)].host} {_rate_text(_bytes_per_second(link))} and "
                f"{_microseconds_text(link['latency'])}")
                for link in _links_of_host(host_index, links))  # fmt: skip
        is_slow = (
            rate_by_host[host_index] < _SLOW_LINK_SHARE * median_rate
            or latency_by_host[host_index] > _LATE_FACTOR * median_latency + _LATE_SECONDS
        )
        median_text = (
            f", where {_rate_text(median_rate)} and {_microseconds_text(median_latency)} are the median"
            if is_slow
            else ""
        )
        observation = f"{'SLOW: ' if is_slow else ''}{', '.join(link_texts)}{median_text}"
        remedy = (
            "check its cable, switch port and interface (ethtool, ibstat) and "
            "launch.interface, or --exclude it"
        )
        finding = finding_ok_or_with_remedy(
            node.host, "link", not is_slow, observation, remedy, verdict_if_not_good=FAILED
        )
        yield _add_figures(
            finding,
            bytes_per_second=rate_by_host[host_index],
            latency_seconds=latency_by_host[host_index],
        )


def _all_reduce_speed_finding_if_measured(
    measurements: Mapping[str, Any], nodes: Sequence[Node]
) -> Iterator[Finding]:
    all_reduce = measurements.get("all_reduce")
    if all_reduce is None:
        return
    rank_count = sum(node.slots for node in nodes)
    # Bus bandwidth as nccl-tests defines it: a ring sends each byte 2 (n - 1) / n times.
    bus_rate = 2 * (rank_count - 1) / rank_count * all_reduce["bytes"] / all_reduce["seconds"]
    observation = (
        f"{count_with_noun(rank_count, 'rank')}: {_microseconds_text(all_reduce['latency'])} for 4 B, "
        f"{_rate_text(bus_rate)} on the bus for "
        f"{human_bytes(all_reduce['bytes'])}"
    )
    yield _add_figures(
        Finding("all", "all-reduce", OK, observation),
        bytes_per_second=bus_rate,
        latency_seconds=all_reduce["latency"],
    )


def _links_of_host(host_index: int, links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [link for link in links if host_index in link["hosts"]]


def _other_host(host_index: int, link: Mapping[str, Any]) -> int:
    first_host, second_host = link["hosts"]
    return int(second_host if first_host == host_index else first_host)


def _bytes_per_second(link: Mapping[str, Any]) -> float:
    return float(link["bytes"] / link["seconds"])


def _add_figures(finding: Finding, **figures: float) -> Finding:
    finding.figures.update({name: float(f"{figure:.4g}") for name, figure in figures.items()})
    return finding


def _flops_text(flops_per_second: float) -> str:
    return (
        f"{flops_per_second / 1e12:.1f} TFLOP/s"
        if flops_per_second >= 1e12
        else f"{flops_per_second / 1e9:.0f} GFLOP/s"
    )


def _rate_text(bytes_per_second: float) -> str:
    return (
        f"{bytes_per_second / 1e9:.2f} GB/s"
        if bytes_per_second >= 1e9
        else f"{bytes_per_second / 1e6:.1f} MB/s"
    )


def _microseconds_text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"

"""`launch.binding`: the cores of its host on which a rank runs, set before any thread starts.

All our launchers leave the ranks unbound and each rank binds itself here, so that binding is the
same under all of them. The threads of a rank then allocate memory beside those cores. Standard
library only; Linux.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.base.errors import LaunchError
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.engine_report import Binding

_SYSTEM = Path("/sys/devices/system")
_GPUS = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")
_THREADS_VARIABLE = "OMP_NUM_THREADS"


class Cpu(NamedTuple):
    """A logical processor, by NUMA node, core and number."""

    numa_node: int
    core: int
    """The first logical processor of its core."""
    cpu_number: int
    # The order of the fields is the sort order: processors of a core and of a node stay together.


class RankCoreBinding(NamedTuple):
    """The binding of one rank."""

    requested_binding: str
    """The value of `launch.binding`."""
    used: str
    """core, numa or none."""
    cpus: tuple[int, ...]
    """The logical processors on which the rank may run."""
    threads: int | None
    """The rank's share of these processors; None if it is not bound."""
    unbound_reason: str | None
    """The reason why the rank is not bound; None if it is."""

    def binding_record(self, cores_by_rank: list[str], bindings_by_rank: list[str]) -> Binding:
        """Return the record for engine.json.

        Args:
            cores_by_rank: the cores of every rank.
            bindings_by_rank: the binding of every rank; hosts may differ in ranks and cores.
        """
        common_binding = next(
            (rank_binding for rank_binding in bindings_by_rank if rank_binding != "none"), "none"
        )
        return Binding(
            self.requested_binding,
            common_binding,
            None if common_binding != "none" else self.unbound_reason,
            cores_by_rank,
        )


def bind_process_and_set_openmp_threads_unless_user_does(
    requested_binding: str, plan: Plan, rank: Rank, environ: MutableMapping[str, str]
) -> RankCoreBinding:
    """Bind this process and the threads that it will start, as `launch.binding` requires.

    Raises:
        LaunchError: the user set more threads than a bound rank has cores.
    """
    allowed_cpus = os.sched_getaffinity(0)
    if requested_binding == "none":
        return RankCoreBinding(
            requested_binding, "none", tuple(sorted(allowed_cpus)), None, "not requested"
        )
    if not plan.started_by.is_ours:
        unbound_reason = "your own launcher binds ranks: srun --cpu-bind, mpirun --bind-to"
        return RankCoreBinding(
            requested_binding, "none", tuple(sorted(allowed_cpus)), None, unbound_reason
        )
    rank_binding = choose_cpus_of_rank(
        requested_binding,
        cpus_sorted_by_numa_node_and_core(allowed_cpus),
        rank,
        numa_node_of_each_local_gpu_or_none(plan, rank, environ),
    )
    if rank_binding.threads is None:
        return rank_binding
    threads = _user_thread_count_or_none(plan, environ) or rank_binding.threads
    if threads > len(rank_binding.cpus):
        unbound_reason = f"{_THREADS_VARIABLE} is {threads}, and a rank would have {len(rank_binding.cpus)} cores"
        if requested_binding != "auto":
            raise LaunchError(
                f"launch.binding is {requested_binding}, {unbound_reason}; lower it, or set launch.binding=none"
            )
        return RankCoreBinding(
            requested_binding, "none", tuple(sorted(allowed_cpus)), None, unbound_reason
        )
    # Threads inherit the affinity of the process when they start: later would be too late.
    os.sched_setaffinity(0, rank_binding.cpus)
    environ[_THREADS_VARIABLE] = str(threads)
    return rank_binding._replace(threads=threads)


def set_openmp_wait_policy_unless_set(environ: MutableMapping[str, str]) -> None:
    """Set OMP_WAIT_POLICY=passive, unless the user has set it; before an OpenMP library is loaded.

    By default a thread spins while it waits at the end of a parallel region for others. Beside one
    busy process of another program on one of two cores, a training step was 8 times as slow.
    GOMP_SPINCOUNT and KMP_BLOCKTIME of the user have priority over it in their libraries.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")


def _user_thread_count_or_none(plan: Plan, environ: Mapping[str, str]) -> int | None:
    """Return the user's number of threads, or None."""
    # The variable may also be ours, because torchrun is started with it: only values that the plan
    # forwards or sets come from the user.
    requested_threads = (
        environ.get(_THREADS_VARIABLE, "")
        if _THREADS_VARIABLE in (*plan.forward, *dict(plan.env))
        else ""
    )
    return (
        int(requested_threads) if requested_threads.isdecimal() and int(requested_threads) else None
    )


def choose_cpus_of_rank(
    requested_binding: str,
    cpus: Sequence[Cpu],
    rank: Rank,
    gpu_numa_nodes: Sequence[int | None] = (),
) -> RankCoreBinding:
    """Choose the logical processors of this rank.

    Args:
        requested_binding: the value of `launch.binding`.
        cpus: the processors that the ranks of this host share, in order.
        rank: this rank.
        gpu_numa_nodes: the NUMA node of each local rank's GPU; empty on a CPU.
    """
    all_cpus = tuple(sorted(cpu.cpu_number for cpu in cpus))
    rank_count = rank.local_world_size
    nodes = sorted({cpu.numa_node for cpu in cpus})
    cores = sorted({(cpu.numa_node, cpu.core) for cpu in cpus})
    unbound_reason = None
    if requested_binding == "core" and rank_count > len(cores):
        unbound_reason = f"there are {rank_count} ranks and {len(cores)} cores"
    elif requested_binding == "core" and rank_count == 1:
        unbound_reason = "one rank has all cores"
    elif requested_binding != "core" and len(nodes) == 1:
        unbound_reason = "its cores are one NUMA node"
    elif requested_binding != "core" and rank_count == 1 and not gpu_numa_nodes:
        unbound_reason = "one rank has all NUMA nodes"
    elif requested_binding == "auto" and not gpu_numa_nodes and rank_count % len(nodes):
        unbound_reason = (
            f"{rank_count} ranks cannot be divided evenly among {len(nodes)} NUMA nodes"
        )
    if unbound_reason:
        return RankCoreBinding(requested_binding, "none", all_cpus, None, unbound_reason)
    if requested_binding == "core":
        cpu_numbers = _cpu_numbers_in_equal_share(cpus, cores, rank)
        return RankCoreBinding(
            requested_binding, "core", tuple(sorted(cpu_numbers)), len(cpu_numbers), None
        )
    nodes_by_rank = [
        _numa_nodes_of_rank(local_rank, rank_count, nodes, gpu_numa_nodes)
        for local_rank in range(rank_count)
    ]
    cpu_numbers = [
        cpu.cpu_number for cpu in cpus if cpu.numa_node in nodes_by_rank[rank.local_rank]
    ]
    sharing = nodes_by_rank.count(nodes_by_rank[rank.local_rank])
    return RankCoreBinding(
        requested_binding,
        "numa",
        tuple(sorted(cpu_numbers)),
        max(1, len(cpu_numbers) // sharing),
        None,
    )


def _cpu_numbers_in_equal_share(
    cpus: Sequence[Cpu], cores: Sequence[tuple[int, int]], rank: Rank
) -> list[int]:
    """Return the processors of this rank, equally many for every rank of the host.

    A rank has whole cores if the cores divide evenly, else whole processors.
    """
    # Equal shares, because all ranks wait for the slowest.
    rank_count = rank.local_world_size
    local_rank = rank.local_rank
    if len(cores) % rank_count == 0:
        cores_of_rank = set(_equal_slice(cores, local_rank, rank_count))
        return [cpu.cpu_number for cpu in cpus if (cpu.numa_node, cpu.core) in cores_of_rank]
    cpus_per_rank = len(cpus) // rank_count
    return [
        cpu.cpu_number
        for cpu in cpus[local_rank * cpus_per_rank : (local_rank + 1) * cpus_per_rank]
    ]


def _numa_nodes_of_rank(
    local_rank: int,
    rank_count: int,
    numa_nodes: Sequence[int],
    gpu_numa_nodes: Sequence[int | None],
) -> tuple[int, ...]:
    """Return a rank's NUMA nodes: its GPU's, else its share of all, else one that ranks share."""
    if gpu_numa_nodes and gpu_numa_nodes[local_rank] in numa_nodes:
        return (gpu_numa_nodes[local_rank],)  # type: ignore[return-value]  # it is one of `nodes`
    return tuple(_equal_slice(numa_nodes, local_rank, rank_count)) or (
        numa_nodes[local_rank * len(numa_nodes) // rank_count],
    )


def _equal_slice(items: Sequence[object], share_index: int, share_count: int) -> Sequence[Any]:
    return items[
        share_index * len(items) // share_count : (share_index + 1) * len(items) // share_count
    ]


def cpus_sorted_by_numa_node_and_core(cpu_numbers: Iterable[int]) -> list[Cpu]:
    """Return these logical processors, sorted by NUMA node and core."""
    nodes = _numa_node_by_cpu_number()
    return sorted(
        Cpu(nodes.get(cpu_number, 0), _first_sibling_of_cpu(cpu_number), cpu_number)
        for cpu_number in cpu_numbers
    )


def _numa_node_by_cpu_number() -> dict[int, int]:
    node_by_cpu = {}
    for path in (_SYSTEM / "node").glob("node[0-9]*/cpulist"):
        for cpu_number in parse_cpu_list(path.read_text()):
            node_by_cpu[cpu_number] = int(path.parent.name[len("node") :])
    return node_by_cpu


def _first_sibling_of_cpu(cpu_number: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return min(
            parse_cpu_list(
                (_SYSTEM / f"cpu/cpu{cpu_number}/topology/thread_siblings_list").read_text()
            )
        )
    return cpu_number


def numa_node_of_each_local_gpu_or_none(
    plan: Plan, rank: Rank, environ: Mapping[str, str]
) -> list[int | None]:
    """Return the NUMA node of each local rank's GPU; None where it is unknown; empty on a CPU."""
    if plan.device != "cuda":
        return []
    # The driver numbers GPUs by their PCI address.
    gpu_addresses = sorted(path.name for path in _GPUS.glob("*"))
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        device_words = [word.strip() for word in visible_devices.split(",")]
        gpu_addresses = [
            gpu_addresses[int(word)]
            for word in device_words
            if word.isdecimal() and int(word) < len(gpu_addresses)
        ]
    devices = plan.node_of(rank.rank).devices
    return [
        _numa_node_of_gpu(gpu_addresses[index]) if index < len(gpu_addresses) else None
        for index in devices
    ]


def _numa_node_of_gpu(pci_address: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        node = int((_PCI / pci_address.lower() / "numa_node").read_text())
        # The kernel writes -1 for a device without a NUMA node.
        return node if node >= 0 else None
    return None


def parse_cpu_list(cpu_list: str) -> list[int]:
    """Return the integers of a list such as `0-2,5`, as the kernel writes it."""
    range_ends = [part.partition("-") for part in cpu_list.strip().split(",") if part]
    return [
        cpu_number
        for range_start, _, range_end in range_ends
        for cpu_number in range(int(range_start), int(range_end or range_start) + 1)
    ]


def format_cpu_list(cpu_numbers: Sequence[int]) -> str:
    """Return a list such as `0-2,5`, as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu_number in cpu_numbers:
        if runs and cpu_number == runs[-1][-1] + 1:
            runs[-1].append(cpu_number)
        else:
            runs.append([cpu_number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

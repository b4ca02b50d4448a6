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

from ortlaunch.errors import LaunchError
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.engine_report import Binding

_SYSTEM = Path("/sys/devices/system")
_GPUS = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")
_THREADS = "OMP_NUM_THREADS"


class Cpu(NamedTuple):
    """A logical processor, by NUMA node, core and number."""

    node: int
    core: int
    """The first logical processor of its core."""
    number: int
    # The order of the fields is the sort order: processors of a core and of a node stay together.


class Bound(NamedTuple):
    """The binding of one rank."""

    asked: str
    """The value of `launch.binding`."""
    used: str
    """core, numa or none."""
    cpus: tuple[int, ...]
    """The logical processors on which the rank may run."""
    threads: int | None
    """The rank's share of these processors; None if it is not bound."""
    why: str | None
    """The reason why the rank is not bound; None if it is."""

    def report(self, cores: list[str], used: list[str]) -> Binding:
        """Return the record for engine.json.

        Args:
            cores: the cores of every rank.
            used: the binding of every rank; hosts may differ in ranks and cores.
        """
        how = next((word for word in used if word != "none"), "none")
        return Binding(self.asked, how, None if how != "none" else self.why, cores)


def bind(asked: str, plan: Plan, rank: Rank, environ: MutableMapping[str, str]) -> Bound:
    """Bind this process and the threads that it will start, as `launch.binding` requires.

    Raises:
        LaunchError: the user set more threads than a bound rank has cores.
    """
    allowed = os.sched_getaffinity(0)
    if asked == "none":
        return Bound(asked, "none", tuple(sorted(allowed)), None, "not requested")
    if not plan.started_by.is_ours:
        why = "your own launcher binds ranks: srun --cpu-bind, mpirun --bind-to"
        return Bound(asked, "none", tuple(sorted(allowed)), None, why)
    found = choose(asked, cpus_of(allowed), rank, gpu_nodes(plan, rank, environ))
    if found.threads is None:
        return found
    threads = _requested_threads(plan, environ) or found.threads
    if threads > len(found.cpus):
        why = f"{_THREADS} is {threads}, and a rank would have {len(found.cpus)} cores"
        if asked != "auto":
            raise LaunchError(
                f"launch.binding is {asked}, {why}; lower it, or set launch.binding=none"
            )
        return Bound(asked, "none", tuple(sorted(allowed)), None, why)
    # Threads inherit the affinity of the process when they start: later would be too late.
    os.sched_setaffinity(0, found.cpus)
    environ[_THREADS] = str(threads)
    return found._replace(threads=threads)


def let_waiting_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Set OMP_WAIT_POLICY=passive, unless the user has set it; before an OpenMP library is loaded.

    By default a thread spins while it waits at the end of a parallel region for others. Beside one
    busy process of another program on one of two cores, a training step was 8 times as slow.
    GOMP_SPINCOUNT and KMP_BLOCKTIME of the user have priority over it in their libraries.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")


def _requested_threads(plan: Plan, environ: Mapping[str, str]) -> int | None:
    """Return the user's number of threads, or None."""
    # The variable may also be ours, because torchrun is started with it: only values that the plan
    # forwards or sets come from the user.
    asked = environ.get(_THREADS, "") if _THREADS in (*plan.forward, *dict(plan.env)) else ""
    return int(asked) if asked.isdecimal() and int(asked) else None


def choose(asked: str, cpus: Sequence[Cpu], rank: Rank, gpus: Sequence[int | None] = ()) -> Bound:
    """Choose the logical processors of this rank.

    Args:
        asked: the value of `launch.binding`.
        cpus: the processors that the ranks of this host share, in order.
        rank: this rank.
        gpus: the NUMA node of each local rank's GPU; empty on a CPU.
    """
    everything = tuple(sorted(cpu.number for cpu in cpus))
    ranks = rank.local_world_size
    nodes = sorted({cpu.node for cpu in cpus})
    cores = sorted({(cpu.node, cpu.core) for cpu in cpus})
    why = None
    if asked == "core" and ranks > len(cores):
        why = f"there are {ranks} ranks and {len(cores)} cores"
    elif asked == "core" and ranks == 1:
        why = "one rank has all cores"
    elif asked != "core" and len(nodes) == 1:
        why = "its cores are one NUMA node"
    elif asked != "core" and ranks == 1 and not gpus:
        why = "one rank has all NUMA nodes"
    elif asked == "auto" and not gpus and ranks % len(nodes):
        why = f"{ranks} ranks cannot be divided evenly among {len(nodes)} NUMA nodes"
    if why:
        return Bound(asked, "none", everything, None, why)
    if asked == "core":
        found = _dealt(cpus, cores, rank)
        return Bound(asked, "core", tuple(sorted(found)), len(found), None)
    of_rank = [_nodes_of(local, ranks, nodes, gpus) for local in range(ranks)]
    found = [cpu.number for cpu in cpus if cpu.node in of_rank[rank.local_rank]]
    sharing = of_rank.count(of_rank[rank.local_rank])
    return Bound(asked, "numa", tuple(sorted(found)), max(1, len(found) // sharing), None)


def _dealt(cpus: Sequence[Cpu], cores: Sequence[tuple[int, int]], rank: Rank) -> list[int]:
    """Return the processors of this rank, equally many for every rank of the host.

    A rank has whole cores if the cores divide evenly, else whole processors.
    """
    # Equal shares, because all ranks wait for the slowest.
    ranks = rank.local_world_size
    local = rank.local_rank
    if len(cores) % ranks == 0:
        mine = set(_share(cores, local, ranks))
        return [cpu.number for cpu in cpus if (cpu.node, cpu.core) in mine]
    each = len(cpus) // ranks
    return [cpu.number for cpu in cpus[local * each : (local + 1) * each]]


def _nodes_of(
    local: int, ranks: int, nodes: Sequence[int], gpus: Sequence[int | None]
) -> tuple[int, ...]:
    """Return a rank's NUMA nodes: its GPU's, else its share of all, else one that ranks share."""
    if gpus and gpus[local] in nodes:
        return (gpus[local],)  # type: ignore[return-value]  # it is one of `nodes`
    return tuple(_share(nodes, local, ranks)) or (nodes[local * len(nodes) // ranks],)


def _share(things: Sequence[object], number: int, shares: int) -> Sequence[Any]:
    return things[number * len(things) // shares : (number + 1) * len(things) // shares]


def cpus_of(allowed: Iterable[int]) -> list[Cpu]:
    """Return these logical processors, sorted by NUMA node and core."""
    nodes = _node_of_each()
    return sorted(Cpu(nodes.get(number, 0), _first_of_core(number), number) for number in allowed)


def _node_of_each() -> dict[int, int]:
    found = {}
    for path in (_SYSTEM / "node").glob("node[0-9]*/cpulist"):
        for number in numbers(path.read_text()):
            found[number] = int(path.parent.name[len("node") :])
    return found


def _first_of_core(number: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return min(
            numbers((_SYSTEM / f"cpu/cpu{number}/topology/thread_siblings_list").read_text())
        )
    return number


def gpu_nodes(plan: Plan, rank: Rank, environ: Mapping[str, str]) -> list[int | None]:
    """Return the NUMA node of each local rank's GPU; None where it is unknown; empty on a CPU."""
    if plan.device != "cuda":
        return []
    # The driver numbers GPUs by their PCI address.
    present = sorted(path.name for path in _GPUS.glob("*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        words = [word.strip() for word in chosen.split(",")]
        present = [
            present[int(word)] for word in words if word.isdecimal() and int(word) < len(present)
        ]
    devices = plan.node_of(rank.rank).devices
    return [_node_of_gpu(present[index]) if index < len(present) else None for index in devices]


def _node_of_gpu(address: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        node = int((_PCI / address.lower() / "numa_node").read_text())
        # The kernel writes -1 for a device without a NUMA node.
        return node if node >= 0 else None
    return None


def numbers(text: str) -> list[int]:
    """Return the integers of a list such as `0-2,5`, as the kernel writes it."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [
        number for first, _, last in ends for number in range(int(first), int(last or first) + 1)
    ]


def shown(cpus: Sequence[int]) -> str:
    """Return a list such as `0-2,5`, as the kernel writes it."""
    runs: list[list[int]] = []
    for number in cpus:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

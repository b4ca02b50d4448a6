"""`launch.binding`: which of its host's cores a rank runs on, settled before anything starts threads.

Every launcher of ours leaves the ranks unbound, and each rank binds itself here: one way under all of them. What its
threads allocate comes from the memory beside those cores. Standard library only; Linux.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.errors import LaunchError
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.engine_report import Binding

_SYSTEM = Path("/sys/devices/system")
_GPUS = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")
_THREADS = "OMP_NUM_THREADS"


class Cpu(NamedTuple):
    """A logical processor, in the order in which cores are dealt out."""

    node: int
    core: int
    """The first of the logical processors of its core."""
    number: int


class Bound(NamedTuple):
    """What a rank is bound to."""

    asked: str
    used: str
    """core, numa or none."""
    cpus: tuple[int, ...]
    """That it may run on."""
    threads: int | None
    """Its share of them; None: not bound."""
    why: str | None
    """Why it is not bound."""

    def report(self, cores: list[str], used: list[str]) -> Binding:
        """For engine.json, by the cores of every rank and what bound it: hosts may differ in ranks and cores."""
        how = next((word for word in used if word != "none"), "none")
        return Binding(self.asked, how, None if how != "none" else self.why, cores)


def bind(asked: str, plan: Plan, rank: Rank, environ: MutableMapping[str, str]) -> Bound:
    """Bind this process, and the threads that it will start, as `launch.binding` has it.

    Raises:
        LaunchError: more threads are asked for than a rank has cores then.
    """
    allowed = os.sched_getaffinity(0)
    if asked == "none":
        return Bound(asked, "none", tuple(sorted(allowed)), None, "nobody asked for it")
    if not plan.started_by.is_ours:
        why = "the launcher of your own does it, or not: srun --cpu-bind, mpirun --bind-to"
        return Bound(asked, "none", tuple(sorted(allowed)), None, why)
    found = choose(asked, cpus_of(allowed), rank, gpu_nodes(plan, rank, environ))
    if found.threads is None:
        return found
    threads = _asked_threads(plan, environ) or found.threads
    if threads > len(found.cpus):
        why = f"{_THREADS} is {threads}, and a rank would have {len(found.cpus)} cores"
        if asked != "auto":
            raise LaunchError(
                f"launch.binding is {asked}, {why}; lower it, or set launch.binding=none"
            )
        return Bound(asked, "none", tuple(sorted(allowed)), None, why)
    os.sched_setaffinity(0, found.cpus)
    environ[_THREADS] = str(threads)
    return found._replace(threads=threads)


def _asked_threads(plan: Plan, environ: Mapping[str, str]) -> int | None:
    """The user's number of threads; torchrun is started with one of ours."""
    asked = environ.get(_THREADS, "") if _THREADS in (*plan.forward, *dict(plan.env)) else ""
    return int(asked) if asked.isdecimal() and int(asked) else None


def choose(asked: str, cpus: Sequence[Cpu], rank: Rank, gpus: Sequence[int | None] = ()) -> Bound:
    """Which logical processors this rank gets.

    Args:
        cpus: that the ranks of this host have together, in order.
        gpus: the NUMA node of the GPU of each of its ranks.
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
        why = f"{ranks} ranks cannot be dealt out evenly to {len(nodes)} NUMA nodes"
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
    """As many for each rank, for all wait for the slowest: whole cores where that leaves none over."""
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
    """NUMA nodes of a rank: its GPU's, else its share of them all, else the one that it shares."""
    if gpus and gpus[local] in nodes:
        return (gpus[local],)  # type: ignore[return-value]  # it is one of `nodes`
    return tuple(_share(nodes, local, ranks)) or (nodes[local * len(nodes) // ranks],)


def _share(things: Sequence[object], number: int, shares: int) -> Sequence[Any]:
    return things[number * len(things) // shares : (number + 1) * len(things) // shares]


def cpus_of(allowed: Iterable[int]) -> list[Cpu]:
    """These logical processors, those of a core and of a NUMA node beside each other."""
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
    """The NUMA node beside the GPU of each rank of this host, None where it is unknown; empty on a CPU.

    GPUs count as the driver lists them, by their address on the bus.
    """
    if plan.device != "cuda":
        return []
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
        return node if node >= 0 else None
    return None


def numbers(text: str) -> list[int]:
    """`0-2,5` as the kernel writes it."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [
        number for first, _, last in ends for number in range(int(first), int(last or first) + 1)
    ]


def shown(cpus: Sequence[int]) -> str:
    """`0-2,5`, as the kernel writes it."""
    runs: list[list[int]] = []
    for number in cpus:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""The cores of a rank, on machines that the tests describe as the kernel would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch.base.errors import LaunchError
from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank
from ortlaunch.worker.engine import binding
from ortlaunch.worker.engine.binding import (
    Cpu,
    RankCoreBinding,
    bind_process_and_set_openmp_threads_unless_user_does,
    choose_cpus_of_rank,
    cpus_sorted_by_numa_node_and_core,
    format_cpu_list,
    numa_node_of_each_local_gpu_or_none,
    parse_cpu_list,
    set_openmp_wait_policy_unless_set,
)
from tests.makers import host, plan, recipe

FLAT = [Cpu(0, number, number) for number in range(6)]
# Two sockets of two cores with two threads each, numbered as Linux does: 0-3 are the first threads
# of the cores, 4-7 the second ones.
TWO_NODES = [Cpu(0, 0, 0), Cpu(0, 0, 4), Cpu(0, 1, 1), Cpu(0, 1, 5), Cpu(1, 2, 2), Cpu(1, 2, 6), Cpu(1, 3, 3),
             Cpu(1, 3, 7)]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "cpus", "ranks", "gpus", "used", "cores", "threads"),
    [
        ("core", FLAT, 2, (), "core", ["0-2", "3-5"], 3),
        ("core", FLAT, 4, (), "core", ["0", "1", "2", "3"], 1),
        ("core", TWO_NODES, 4, (), "core", ["0,4", "1,5", "2,6", "3,7"], 2),
        # Four cores do not divide by three ranks: each rank gets equally many processors.
        ("core", TWO_NODES, 3, (), "core", ["0,4", "1,5", "2,6"], 2),
        # More ranks than cores.
        ("core", FLAT, 7, (), "none", ["0-5"] * 7, None),
        # One rank has all cores without binding.
        ("core", FLAT, 1, (), "none", ["0-5"], None),
        ("numa", TWO_NODES, 2, (), "numa", ["0-1,4-5", "2-3,6-7"], 4),
        ("numa", TWO_NODES, 4, (), "numa", ["0-1,4-5"] * 2 + ["2-3,6-7"] * 2, 2),
        ("numa", TWO_NODES, 3, (), "numa", ["0-1,4-5"] * 2 + ["2-3,6-7"], 2),
        ("numa", TWO_NODES, 1, (), "none", ["0-7"], None),
        ("numa", FLAT, 2, (), "none", ["0-5"] * 2, None),
        ("auto", FLAT, 2, (), "none", ["0-5"] * 2, None),
        # Three ranks cannot be divided evenly over two nodes.
        ("auto", TWO_NODES, 3, (), "none", ["0-7"] * 3, None),
        ("auto", TWO_NODES, 2, (), "numa", ["0-1,4-5", "2-3,6-7"], 4),
        ("auto", TWO_NODES, 1, (1,), "numa", ["2-3,6-7"], 4),
        # Each rank is bound beside its GPU.
        ("numa", TWO_NODES, 2, (1, 0), "numa", ["2-3,6-7", "0-1,4-5"], 4),
        # The nodes of the GPUs are unknown.
        ("numa", TWO_NODES, 2, (None, None), "numa", ["0-1,4-5", "2-3,6-7"], 4),
    ],
)
def test_cores_of_ranks(
    asked: str, cpus: list[Cpu], ranks: int, gpus: tuple[int | None, ...], used: str, cores: list[str],
    threads: int | None,
) -> None:  # fmt: skip
    """All ranks get equally many cores, whole if possible, beside their GPU and in one node."""
    found = [
        choose_cpus_of_rank(asked, cpus, Rank(rank, ranks, rank, ranks), gpus)
        for rank in range(ranks)
    ]
    assert [format_cpu_list(one.cpus) for one in found] == cores
    assert (found[0].used, found[0].threads, bool(found[0].unbound_reason)) == (
        used,
        threads,
        used == "none",
    )


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The bindings of a process on a machine with four cores."""
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
    monkeypatch.setattr(
        binding,
        "cpus_sorted_by_numa_node_and_core",
        lambda allowed: [Cpu(0, number, number) for number in sorted(allowed)],
    )
    return bound


def test_threads_follow(cores: list[set[int]]) -> None:
    """A rank has as many threads as cores; the user may set fewer, and more are refused."""
    # More threads than cores would wait for each other.
    rank = Rank(1, 2, 1, 2)
    made = plan(recipe(), [host("a", 2)], "torchrun")
    # torchrun's value, not the user's.
    environ = {"OMP_NUM_THREADS": "1"}
    assert bind_process_and_set_openmp_threads_unless_user_does(
        "core", made, rank, environ
    ) == RankCoreBinding("core", "core", (2, 3), 2, None)
    assert (environ, cores) == ({"OMP_NUM_THREADS": "2"}, [{2, 3}])
    for count in ("1", "3"):
        made = plan(recipe(launch={"env": {"OMP_NUM_THREADS": count}}), [host("a", 2)], "torchrun")
        if count == "1":
            assert (
                bind_process_and_set_openmp_threads_unless_user_does(
                    "core", made, rank, {"OMP_NUM_THREADS": "1"}
                ).threads
                == 1
            )
            continue
        with pytest.raises(
            LaunchError,
            match=r"^launch.binding is core, OMP_NUM_THREADS is 3, and a rank would have 2",
        ):
            bind_process_and_set_openmp_threads_unless_user_does(
                "core", made, rank, {"OMP_NUM_THREADS": "3"}
            )
    assert len(cores) == 2


def test_a_launcher_of_the_users_own_binds_or_does_not(cores: list[set[int]]) -> None:
    """The ranks of the user's own launcher are not bound."""
    # Its ranks may have their cores already, which must not be divided again.
    made = plan(recipe(), [host("a", 2)], "inside")
    found = bind_process_and_set_openmp_threads_unless_user_does("core", made, Rank(0, 2, 0, 2), {})
    assert (found.used, "srun --cpu-bind" in (found.unbound_reason or ""), cores) == (
        "none",
        True,
        [],
    )


def test_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and siblings are read from /sys, and a GPU's node by its index among visible GPUs."""
    for node, text in ((0, "0,2"), (1, "1,3\n")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(text)
    for number, text in enumerate(("0,2", "1,3") * 2):
        (tmp_path / f"cpu/cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(text)
    for number, address in enumerate(("0000:1B:00.0", "0000:9B:00.0")):
        (tmp_path / "gpus" / address).mkdir(parents=True)
        (tmp_path / "pci" / address.lower()).mkdir(parents=True)
        (tmp_path / "pci" / address.lower() / "numa_node").write_text(f"{number}\n")
    monkeypatch.setattr(binding, "_SYSTEM", tmp_path)
    monkeypatch.setattr(binding, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(binding, "_PCI", tmp_path / "pci")
    assert cpus_sorted_by_numa_node_and_core({0, 1, 2, 3}) == [
        Cpu(0, 0, 0),
        Cpu(0, 0, 2),
        Cpu(1, 1, 1),
        Cpu(1, 1, 3),
    ]
    made = plan(recipe(launch={"device": "cuda"}), [Host("a", 2, (0, 1))], "torchrun")
    # Plans are frozen.
    object.__setattr__(made, "device", "cuda")
    assert numa_node_of_each_local_gpu_or_none(made, Rank(0, 2, 0, 2), {}) == [0, 1]
    # Only one GPU is visible, so that the node of the second rank is unknown.
    assert numa_node_of_each_local_gpu_or_none(
        made, Rank(0, 2, 0, 2), {"CUDA_VISIBLE_DEVICES": "1"}
    ) == [
        1,
        None,
    ]


def test_lists_as_the_kernel_writes_them() -> None:
    """A list in the kernel's form is read and written without change."""
    assert format_cpu_list(parse_cpu_list("0-2,5,7-8\n")) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("own", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_threads_that_wait_sleep(own: dict[str, str], policy: str) -> None:
    """OpenMP's threads do not spin at barriers, unless the user's environment says otherwise."""
    environ = dict(own)
    set_openmp_wait_policy_unless_set(environ)
    assert environ["OMP_WAIT_POLICY"] == policy

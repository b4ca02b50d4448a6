"""Hosts and ranks from Slurm's variables: in a task, and in a script without srun."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.base.errors import PlanError
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import Rank
from tests.control.planning.test_world import HERE, resolved
from tests.makers import host

pytestmark = pytest.mark.usefixtures("box")


def slurm(rank: int, size: int, local: int, layout: str, node: int = 0) -> dict[str, str]:
    """Return the variables that srun sets."""
    names = {
        "PROCID": rank,
        "NTASKS": size,
        "LOCALID": local,
        "TASKS_PER_NODE": layout,
        "NODEID": node,
        "STEP_ID": 0,
    }
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("environ", "inside", "hosts"),
    [
        (slurm(0, 2, 0, "2"), Rank(0, 2, 0, 2), (host("localhost", 2),)),
        (slurm(3, 4, 1, "2(x2)", 1), Rank(3, 4, 1, 2), (host("node0", 2), host("node1", 2))),
        (slurm(0, 1, 0, "1"), None, HERE),
        # `srun --pty` in an allocation of four nodes.
        ({**slurm(0, 1, 0, "1"), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, None, HERE),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_JOB_NUM_NODES": "1",
            },
            None,
            HERE,
        ),
    ],
)
def test_inside_slurm(
    environ: dict[str, str], inside: Rank | None, hosts: tuple[Host, ...]
) -> None:
    """A step of several tasks is a launcher; a batch script, and a shell in an allocation, are not."""
    found = resolved(None, LaunchOptions(), **environ)
    assert (found.enclosing_rank, found.hosts) == (inside, hosts)
    assert found.launcher == ("inside" if inside else "local")


@pytest.mark.parametrize(
    ("names", "layout", "rank", "hosts"),
    [
        ("gpu[08-09]", "2,1", Rank(2, 3, 0, 1), (host("gpu08", 2), host("gpu09", 1))),
        # Two groups of numbers in one name.
        ("a,r[1-2]n[3,5]-ib", "1(x4),2", Rank(0, 6, 0, 1),
         (host("a", 1), *(host(f"r{r}n{n}-ib", 1) for r, n in ((1, 3), (1, 5), (2, 3))), host("r2n5-ib", 2))),
    ],
)  # fmt: skip
def test_slurm_names_its_hosts(
    names: str, layout: str, rank: Rank, hosts: tuple[Host, ...]
) -> None:
    """Hosts have Slurm's names and numbers of tasks, which may be unequal."""
    environ = slurm(
        rank.rank, rank.world_size, rank.local_rank, layout, len(hosts) - 1 if rank.rank else 0
    )
    found = resolved(None, LaunchOptions(), **{**environ, "SLURM_STEP_NODELIST": names})
    assert (found.hosts, found.enclosing_rank) == (hosts, rank)


def test_slurm_names_that_do_not_fit() -> None:
    """Names of two nodes and tasks of three are refused."""
    environ = {**slurm(0, 3, 0, "1(x3)"), "SLURM_STEP_NODELIST": "a[1-2]"}
    with pytest.raises(
        PlanError, match=r"Slurm names 2 nodes \(a\[1-2\]\), and tasks for 3 \(1\(x3\)\)"
    ):
        resolved(None, LaunchOptions(), **environ)


def job(nodes: int, tasks: int, **more: str) -> dict[str, str]:
    """Return the variables of a batch script.

    Observed in Slurm 22.05 with `sbatch -N2 -n2`: SLURM_STEP_ID is not set.
    """
    first = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    return {**first, "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS": str(tasks), **more}


@pytest.mark.parametrize(
    ("environ", "launch", "said"),
    [
        (
            job(4, 4),
            {},
            "Slurm job 7 has 4 tasks on 4 nodes, and this is its script or shell, not one",
        ),
        (job(1, 4), {}, "Slurm job 7 has 4 tasks on 1 nodes, "),
        (job(4, 32), {"processes_per_node": 8}, "Slurm job 7 has 32 tasks on 4 nodes, "),
        (
            # 32 tasks, but the GPUs of this node give 8 ranks.
            job(4, 32, GPUS="8"),
            {},
            "this is its script or shell, not one of its tasks: 8 on this node",
        ),
        # The number of an interactive step.
        (job(2, 2, SLURM_STEP_ID="4294967290"), {}, "Slurm job 7 has 2 tasks on 2 nodes, "),
        # Older names of the variables.
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, {}, "Slurm job 7 has 2 tasks on 2 nodes, "),
    ],
)
def test_a_slurm_script_without_srun(
    environ: dict[str, str], launch: dict[str, Any], said: str
) -> None:
    """A job's script that would train on one node of several, or with too few tasks, is refused."""
    with pytest.raises(PlanError) as caught:
        resolved(launch, **environ)
    assert said in str(caught.value)
    assert "start all with `srun ortlaunch train ...`, or set launch.nodes=1" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "launch", "ranks"),
    [
        # The recipe limits the run to this node.
        (job(4, 4), {"nodes": 1}, 1),
        # One rank for each GPU uses all tasks.
        (job(1, 4, GPUS="4"), {}, 4),
        # The recipe uses less than the job has.
        (job(1, 4), {"processes_per_node": 2}, 2),
        (job(1, 1), {}, 1),
    ],
)
def test_a_slurm_script_on_one_node(
    environ: dict[str, str], launch: dict[str, Any], ranks: int
) -> None:
    """A script trains like any shell if it uses all of the job, or if the recipe limits the ranks."""
    found = resolved(launch, **environ)
    assert (sum(host.slots for host in found.hosts), found.enclosing_rank) == (ranks, None)

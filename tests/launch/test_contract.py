"""Tests that each rank, in the environment of a real launcher, is the rank that the plan has."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.launch import load_backend, mpi, processes
from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
from ortlaunch.run_folder.error_record import first_error_record
from ortlaunch.run_folder.folder import RunDir
from tests.launch.tiny import LAUNCHERS, ORTLAUNCH, RECIPE, needs_mpi, write_recipe
from tests.makers import host, plan, recipe

MPICH = os.environ.get("ORTLAUNCH_TEST_MPICH") or shutil.which("mpiexec.hydra") or ""
needs_mpich = pytest.mark.skipif(
    not MPICH,
    reason="no MPICH here: put mpiexec.hydra on PATH, or name its mpiexec in ORTLAUNCH_TEST_MPICH",
)

# In place of the worker: it records its rank, by the code that the worker uses.
WORKER = """
import json, os, pathlib, subprocess, sys
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none
rank = Rank.from_environ(os.environ)
ps = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
told = {"argv": os.environ.get("SECRET", "none") in ps,
        "rank": rank, "launcher": rank_and_launcher_name_or_none(os.environ)[1],
        "SECRET": os.environ.get("SECRET"), "NOTE": os.environ["NOTE"]}
pathlib.Path(sys.argv[1], f"told-{rank.rank}").write_text(json.dumps(told))
"""
LAUNCH = {"env": {"NOTE": "two words"}, "forward": ["SECRET"]}
# The launcher that `detect` finds for each way to start.
SETS = {"torchrun": "torchrun", "mpi": "Open MPI", "mpich": "MPICH / Intel MPI / PALS"}


@pytest.mark.parametrize("launcher", [*LAUNCHERS, pytest.param("mpich", marks=needs_mpich)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_rank_is_the_planned_one(
    launcher: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is the planned rank, and has the variables of the recipe and of the shell.

    A forwarded variable is on no process's command line.
    """
    monkeypatch.setenv("SECRET", "s3cret-value")
    if launcher == "mpich":
        monkeypatch.setattr(mpi, "require_mpirun_here_or_on_path", lambda: MPICH)
    elif launcher == "mpi":
        assert (
            mpi.open_mpi_or_mpich_by_running_mpirun_or_refuse(mpi.require_mpirun_here_or_on_path())
            == "Open MPI"
        )
    name = "mpi" if launcher == "mpich" else launcher
    made = plan(recipe(launch=LAUNCH), [host("localhost", ranks)], name, environ=os.environ)
    made = dataclasses.replace(made, argv=(sys.executable, "-c", WORKER))
    starter = load_backend(name)
    run = RunDir(tmp_path)
    assert (
        processes.forward_signals_until_job_ends(
            processes.write_files_and_start_job(starter.launch_request_of_plan(made, run))
        )
        == 0
    )
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(ranks)]
    assert tuple(Rank(*one["rank"]) for one in told) == made.ranks
    for one in told:
        assert (one["launcher"], one["SECRET"], one["NOTE"]) == (
            SETS[launcher],
            "s3cret-value",
            "two words",
        )
        assert not one["argv"], "the secret stands on a command line"


def test_one_process_is_the_planned_rank(tmp_path: Path) -> None:
    """Without a launcher there is one rank, and no variable sets it."""
    assert rank_and_launcher_name_or_none(os.environ) is None
    made = dataclasses.replace(
        # Without a launcher there is no name of one.
        plan(recipe()),
        argv=(
            sys.executable,
            "-c",
            WORKER.replace("rank_and_launcher_name_or_none(os.environ)[1]", "0"),
        ),
    )
    starter = load_backend("local")
    made = dataclasses.replace(made, env=(("NOTE", ""),))
    assert (
        processes.forward_signals_until_job_ends(
            processes.write_files_and_start_job(
                starter.launch_request_of_plan(made, RunDir(tmp_path))
            )
        )
        == 0
    )
    assert (
        (Rank(*json.loads((tmp_path / "told-0").read_text())["rank"]),)
        == made.ranks
        == (Rank(0, 1, 0, 1),)
    )


def environments(hosts: tuple[Host, ...]) -> dict[str, list[dict[str, str]]]:
    """Return the variables that each launcher would set for every rank on these hosts."""
    ranks = plan(recipe(), hosts, "mpi").ranks
    layout = ",".join(str(one.slots) for one in hosts)
    node = [number for number, one in enumerate(hosts) for _ in range(one.slots)]
    fields = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "Open MPI": tuple(
            f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        ),
        "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "PALS": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        "MVAPICH": tuple(
            f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        ),
    }
    found = {
        name: [dict(zip(names, map(str, rank))) for rank in ranks] for name, names in fields.items()
    }
    # Slurm gives the layout of all nodes instead of a local size.
    found["Slurm"] = [
        {"SLURM_PROCID": str(rank.rank), "SLURM_NTASKS": str(rank.world_size), "SLURM_LOCALID": str(rank.local_rank),
         "SLURM_TASKS_PER_NODE": layout, "SLURM_NODEID": str(node[rank.rank]), "SLURM_STEP_ID": "0"}
        for rank in ranks
    ]  # fmt: skip
    return found


HOSTS = {"even": (host("a", 2), host("b", 2)), "uneven": (host("a", 1), host("b", 3), host("c", 2))}


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("launcher", environments(HOSTS["even"]))
def test_ranks_of_several_hosts(launcher: str, hosts: tuple[Host, ...]) -> None:
    """On several hosts, too, each launcher's variables give the planned ranks."""
    found = tuple(Rank.from_environ(env) for env in environments(hosts)[launcher])
    assert found == plan(recipe(), hosts, "mpi").ranks


def start(launcher: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start two ranks of the command with the user's own launcher."""
    argv = {
        "torchrun": [
            str(Path(sys.executable).with_name("torchrun")),
            "--nproc-per-node=2",
            "--no-python",
        ],
        "mpi": ["mpirun", "-n", "2", "--host", "localhost:2", "--bind-to", "none"],
    }[launcher]
    if launcher == "mpi":
        argv[0] = mpi.require_mpirun_here_or_on_path()
    # Open MPI refuses to run as root without the first two.
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [*argv, ORTLAUNCH, "train", RECIPE]
    env = {**os.environ, **root}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_inside_a_launcher(launcher: str, tmp_path: Path) -> None:
    """Under the user's own launcher, two ranks share one run folder and one training."""
    write_recipe(tmp_path, train={"max_steps": 3}, launch={"env": {"NOTE": "two words"}})
    result = start(launcher, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 1
    run = RunDir(folders[0])
    written = json.loads(run.plan.read_text())
    assert (written["launcher"], written["world_size"]) == ("inside", 2)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [3]
    assert sorted(path.name for path in run.logs.iterdir()) == [
        "rank_00000.err", "rank_00000.out", "rank_00001.err", "rank_00001.out",
    ]  # fmt: skip
    assert json.loads(run.engine.read_text())["ranks"] == 2
    assert [step for step, _ in run.complete_checkpoints()] == [3]


@pytest.mark.parametrize(
    ("launcher", "supervisor_sleeps"),
    [
        pytest.param("torchrun", 0, marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("mpi", 0, marks=[needs_mpi, pytest.mark.slow]),
        pytest.param(
            "mpi",
            2,
            marks=[needs_mpi, pytest.mark.slow, pytest.mark.ci],
            id="mpi, where its peer would end first",
        ),
    ],
)
def test_inside_a_launcher_the_failing_rank_speaks(
    launcher: str, supervisor_sleeps: float, tmp_path: Path
) -> None:
    """Under the user's own launcher, the failing rank prints the cause, once, with its host."""
    # No command of ortlaunch is around the ranks to print it.
    write_recipe(tmp_path, fails=True, supervisor_sleeps=supervisor_sleeps)
    result = start(launcher, tmp_path)
    assert result.returncode == 1
    assert result.stderr.count('raise ValueError("planted")') == 1
    told = [line for line in result.stderr.splitlines() if line.startswith("ortlaunch: rank")]
    assert len(told) == 1
    assert told[0].startswith("ortlaunch: rank 1 on host ")
    assert " (local rank 1) failed with ValueError; exit status 1; log: runs/" in told[0]


@needs_mpi
def test_a_world_that_is_not_the_plans(tmp_path: Path) -> None:
    """A launcher that starts fewer ranks than planned trains nothing."""
    write_recipe(tmp_path, train={"max_steps": 3})
    made = plan(recipe(), [host("localhost", 3)], "mpi")
    run = RunDir(tmp_path / "run")
    made = dataclasses.replace(made, argv=(sys.executable, "-m", "ortlaunch.worker"))
    request = load_backend("mpi").launch_request_of_plan(made, run)
    run.path.mkdir()
    shutil.copy(tmp_path / RECIPE, run.recipe)
    run.plan.write_text(made.to_json())
    # Two ranks instead of three, as with a wrong number typed by hand.
    fewer = request._replace(argv=(request.argv[0], "-n", "2", *request.argv[3:]))
    assert processes.forward_signals_until_job_ends(processes.write_files_and_start_job(fewer)) != 0
    # Of either rank: mpirun ends the other one, perhaps before it wrote its own record.
    record = first_error_record(run)
    assert record is not None
    assert record.message == (
        "the plan has 3 ranks, the launcher started 2; nothing was trained, because a "
        "different world size is a different training"
    )
    assert not run.metrics.exists()

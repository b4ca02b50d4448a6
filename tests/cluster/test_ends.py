"""Ends of runs over hosts: a link lost in training, and requests to a run in Slurm's queue."""

from __future__ import annotations

import subprocess
import time

import pytest

from ortlaunch.run_folder.folder import RunDir
from tests.cluster.home import Home
from tests.cluster.lab import LOGIN
from tests.e2e.runs import COMMAND, reach

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("launcher", "lost"),
    [
        ("torchrun", "host2"),
        pytest.param("mpi", "host2", marks=pytest.mark.nightly),
        ("mpi", "host1"),
    ],
)
def test_a_link_that_is_lost(launcher: str, lost: str, home: Home) -> None:
    """A lost host is named within 15 s, with status 1, and no process of the run remains."""
    words = [
        "train",
        "recipe.yaml",
        "--hostfile",
        "hosts",
        "--launcher",
        launcher,
        "--run-dir",
        home.run.name,
    ]
    command = home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words])
    # Processes that other tests left are not this run's.
    before = {host: set(everything(home, host)) for host in ("host1", "host2")}
    train = subprocess.Popen(
        command, env=home.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    # Three logged steps: the run trains, and start-up is over.
    reach(RunDir(home.run), 3, train)
    home.lab.link(lost, up=False)
    began = time.monotonic()
    try:
        _, errors = train.communicate(timeout=40)
        named = time.monotonic() - began
        for host, known in before.items():
            while left := [line for line in everything(home, host) if line not in known]:
                assert time.monotonic() - began < 30, left
                time.sleep(0.2)
    finally:
        train.kill()
        home.lab.link(lost, up=True)
    said = next((line for line in errors.splitlines() if f"on host {lost} is lost" in line), errors)
    print(f"{said} -> {named:.1f} s, nothing left {time.monotonic() - began:.1f} s")
    assert (train.returncode, f"on host {lost} is lost, and all others" in said, named < 15) == (
        1,
        True,
        True,
    )


def test_ranks_that_cannot_join(home: Home) -> None:
    """Without a preflight check, rank 0 reports after 20 s that connections are missing."""
    (home.folder / "hosts").write_text("host1 slots=1\nhost2 slots=1\nhost3 slots=1\n")
    words = [
        "train",
        "recipe.yaml",
        # Preflight would detect the firewall first.
        "launch.preflight=false",
        "batch.micro_size=8",
        "batch.accumulation_steps=1",
    ]
    words += [
        "batch.global_size=null",
        "--hostfile",
        "hosts",
        "--launcher",
        "torchrun",
        "--run-dir",
        "my run",
    ]
    command = home.lab.command(LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words])
    # Only host2 refuses connections, so that every rank still reaches rank 0 on host1.
    with home.lab.firewall("meta l4proto tcp tcp dport 1024-65535 ct state new", "host2"):
        train = subprocess.Popen(
            command, env=home.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert train.stdout is not None
            lines = []
            for line in train.stdout:
                lines.append(line)
                if "still joining after 20 s" in line:
                    break
        finally:
            train.terminate()
            train.wait(30)
            train.stdout.close()
    assert "every rank reached rank 0, but connections among the others are missing" in lines[-1], (
        "".join(lines)
    )


def test_mpirun_starts_beside_the_files_of_a_killed_one(home: Home) -> None:
    """mpirun starts beside the session folders that a killed one with the same process id left."""
    # Open MPI names its session folder by process id, and a new container repeats the ids.
    for pid in range(2, 300):
        stale = home.folder / "tmp" / f"ompi.{pid}"
        stale.mkdir(parents=True)
        (stale / "pmix.login.tool").touch()
    words = [
        "train",
        "recipe.yaml",
        "train.max_steps=1",
        "--launcher",
        "mpi",
        "--hostfile",
        "hosts",
    ]
    env = {**home.env, "TMPDIR": str(home.folder / "tmp")}
    ended = home.lab.run(
        LOGIN,
        str(COMMAND),
        *words,
        "--run-dir",
        home.run.name,
        cwd=home.folder,
        env=env,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_stalled_run_whose_supervisors_hear_nothing_of_each_other(home: Home) -> None:
    """Blocked UDP is reported; a link lost after that ends the run as a stall, status 124."""
    words = [
        "train",
        "recipe.yaml",
        "train.stall_seconds=12",
        "--hostfile",
        "hosts",
        "--launcher",
        "mpi",
    ]
    command = home.lab.command(
        LOGIN, ["env", "--chdir", str(home.folder), str(COMMAND), *words, "--run-dir", "my run"]
    )
    before = {host: set(everything(home, host)) for host in ("host1", "host2")}
    # Heartbeats of the rank supervisors are UDP datagrams.
    with home.lab.firewall("meta l4proto udp", "host1", "host2"):
        train = subprocess.Popen(
            command, env=home.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            assert train.stderr is not None
            told = []
            for line in train.stderr:
                told.append(line)
                if "no heartbeat" in line:
                    break
            home.reach(3)
            home.lab.link("host2", up=False)
            began = time.monotonic()
            _, errors = train.communicate(timeout=70)
            ended = time.monotonic() - began
            for host, known in before.items():
                while left := [line for line in everything(home, host) if line not in known]:
                    assert time.monotonic() - began < 90, left
                    time.sleep(0.2)
        finally:
            train.kill()
            home.lab.link("host2", up=True)
    print(f"{told[-1].strip()} -> {ended:.1f} s, nothing left {time.monotonic() - began:.1f} s")
    assert "no heartbeat of rank 1 on host host2" in told[-1], told
    assert train.returncode == 124
    assert "the run has stalled" in errors


def everything(home: Home, host: str) -> list[str]:
    """Return the processes of a host, without its daemons and this command."""
    lines = home.lab.run(host, "ps", "-eo", "pid=,args=").stdout.splitlines()
    # sshd is left out, too: it detects a dead link only after minutes.
    return [line for line in lines if not any(word in line for word in ("ps -eo", "sleep", "sshd"))]


def test_a_queued_run_that_is_asked(home: Home) -> None:
    """A queued run obeys `checkpoint` and then `stop` from the login node, and is not requeued."""
    home.well(
        "submit",
        "recipe.yaml",
        "--run-dir",
        home.run.name,
        "launch.nodes=2",
        "launch.processes_per_node=1",
    )
    home.reach(3)
    assert home.well("checkpoint", home.run.name).startswith("saved after step ")
    assert f"{home.run.name}: preempted" in home.well("stop", home.run.name)
    # Time for Slurm to requeue the job, if it wrongly did.
    time.sleep(3)
    status = home.status()
    assert (status["state"], status["job"]["exit_status"]) == ("preempted", 85)

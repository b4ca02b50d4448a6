"""A preempted Slurm run saves, is requeued, and ends with the losses of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.cluster.home import Home
from tests.cluster.lab import LOGIN, Lab, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(280)]
# With a constant rate, the first steps are the same in runs of any length.
CONSTANT = "schedule.name=constant"
# Steps of the longest run, which takes several turns under a time limit of one minute.
LONG = 200


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that trains to the end without interruption."""
    home = Home(lab, tmp_path_factory.mktemp("undisturbed"))
    # toys:net has no sleep; one process with micro batches of 16 has the same global batch.
    words = ("model.factory=toys:net", "batch.micro_size=16", f"train.max_steps={LONG}", CONSTANT)
    home.well("train", "recipe.yaml", "--run-dir", home.run.name, *words)
    return home.losses()


def submitted(home: Home, steps: int, *more: str) -> str:
    """Submit a run of two ranks on two nodes, and return its job id."""
    words = (
        "launch.nodes=2",
        "launch.processes_per_node=1",
        f"train.max_steps={steps}",
        CONSTANT,
        *more,
    )
    return home.well("submit", "recipe.yaml", "--run-dir", home.run.name, *words).strip()


def check(home: Home, job: str, losses: dict[int, float], steps: int) -> None:
    """Check that the run succeeds after at least one restart, with the undisturbed losses."""
    home.well("status", home.run.name, "--wait", timeout=220)
    # Two ranks add gradients in another order than one process.
    assert home.losses() == pytest.approx(
        {step: losses[step] for step in range(1, steps + 1)}, abs=1e-5
    )
    assert home.status()["state"] == "succeeded"
    record = home.lab.run(LOGIN, "scontrol", "show", "job", job).stdout
    assert "Restarts=0" not in record, record
    said = (home.run / "logs" / f"slurm-{job}.out").read_text()
    assert "saved after step" in said
    assert "continuing after step" in said


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_signal(nodes: int, home: Home, undisturbed: dict[int, float]) -> None:
    """A run that receives SIGUSR1 by `scancel --signal` saves and is requeued."""
    job = submitted(home, 12, f"launch.nodes={nodes}")
    home.reach(3)
    home.lab.run(LOGIN, "scancel", "--signal=USR1", job)
    check(home, job, undisturbed, 12)


def test_preemption(home: Home, undisturbed: dict[int, float]) -> None:
    """A run that an urgent job preempts is requeued and continues."""
    job = submitted(home, 12, "submit.partition=main")
    home.reach(3)
    urgent = (
        "--partition=urgent",
        "--nodes=3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "sleep 1",
    )
    assert home.lab.run(LOGIN, "sbatch", *urgent).returncode == 0
    check(home, job, undisturbed, 12)


def test_a_rank_that_was_killed(home: Home, undisturbed: dict[int, float]) -> None:
    """With `launch.max_restarts`, a job with a killed rank is requeued and continues."""
    job = submitted(home, 12, "launch.max_restarts=1", "checkpoint.every_steps=2")
    home.reach(5)
    assert home.lab.run("host2", "pkill", "-KILL", "-f", "ortlaunch.worker.*my run").returncode == 0
    home.well("status", home.run.name, "--wait", timeout=220)
    assert home.losses() == pytest.approx(
        {step: undisturbed[step] for step in range(1, 13)}, abs=1e-5
    )
    said = (home.run / "logs" / f"slurm-{job}.out").read_text()
    assert "attempt 1 failed; a requeue is requested (restart 1 of 1 without progress)" in said
    # 128 + SIGKILL.
    assert home.status()["job"]["attempts"][0]["exit_status"] == 137


@pytest.mark.nightly
def test_a_controller_that_is_started_again(home: Home, undisturbed: dict[int, float]) -> None:
    """A run that saves while slurmctld is away is requeued once it is back."""
    job = submitted(home, 12, "launch.nodes=1")
    home.reach(3)
    with home.lab.without_controller():
        for host in home.lab.names:
            home.lab.run(host, "pkill", "-USR1", "-f", "ortlaunch.worker.*my run")
        output = home.run / "logs" / f"slurm-{job}.out"
        # The words of slurmctld's absence: the first requests for a requeue fail.
        wait_for(lambda: f"for job {job}" in output.read_text(), "scontrol's words", 90)
    check(home, job, undisturbed, 12)


@pytest.mark.nightly
def test_a_node_that_is_taken_for_dead(home: Home, undisturbed: dict[int, float]) -> None:
    """A requeued turn stops the run that its node's earlier turn still trains, and goes on."""
    job = submitted(home, 24, "launch.nodes=1")
    home.reach(3)
    (host,) = home.lab.run(LOGIN, "squeue", "-h", "-j", job, "-o", "%N").stdout.split()
    # The disk is still shared, as with a storage network of its own.
    home.lab.link(host, up=False)
    try:
        down = ("scontrol", "update", f"nodename={host}", "state=down", "reason=lost")
        assert home.lab.run(LOGIN, *down).returncode == 0
        output = home.run / "logs" / f"slurm-{job}.out"
        wait_for(lambda: "requested to stop" in output.read_text(), "the next turn", 90)
        home.well("status", home.run.name, "--wait", timeout=220)
    finally:
        home.lab.link(host, up=True)
        home.lab.run(LOGIN, "scontrol", "update", f"nodename={host}", "state=resume")
    assert home.status()["state"] == "succeeded"
    assert home.losses() == pytest.approx(
        {step: undisturbed[step] for step in range(1, 25)}, abs=1e-5
    )


def test_a_time_limit(home: Home, undisturbed: dict[int, float]) -> None:
    """A run longer than its time limit is requeued until it is finished."""
    # Slurm may send the signal up to 30 s early, so a turn trains for 30 to 60 s.
    job = submitted(home, LONG, "submit.time='1:00'", "submit.signal_seconds=1")
    check(home, job, undisturbed, LONG)

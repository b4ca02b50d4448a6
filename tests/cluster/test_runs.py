"""Whole runs over the lab's hosts, by mpirun, torchrun and Slurm, against one process."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import BERT, COMMAND, environment, merged
from tests.ort import INSTALLED, build

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(280)]
# Dropout draws differ between numbers of ranks, so the curves would, too.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RECIPE = merged(
    BERT,
    {
        "model": {"config": NO_DROPOUT},
        "batch": {"global_size": 16, "micro_size": 4},
        "engine": {"name": "ort" if INSTALLED else "eager"},
        "zero": {"stage": 1},
        "train": {"max_steps": 6, "evaluate_every_steps": None},
        "launch": {"forward": ["WANDB_API_KEY"]},
    },
)
# Its value must reach the ranks without appearing in files or command lines.
SECRET = "s3cret-of-the-tests"


class Site:
    """A user's folder on the shared disk, with methods that run commands in it on the login node."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.env = {
            **lab.environ,
            **environment(folder),
            "PATH": lab.environ["PATH"],
            "WANDB_API_KEY": SECRET,
        }

    def ortlaunch(self, *words: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        with no_secret_on_a_command_line():
            return self.lab.run(
                LOGIN, str(COMMAND), *words, cwd=self.folder, env=self.env, timeout=timeout
            )

    def well(self, *words: str) -> str:
        """Run a command that must succeed, and return its output."""
        ended = self.ortlaunch(*words)
        assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout

    def losses(self, run: str) -> list[float]:
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="module")
def site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A folder with a recipe, its texts and a cache with the built extensions."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "cache").mkdir()
    if INSTALLED:
        build()
    for name, animals in (("train", "cats"), ("held-out", "birds")):
        text = [
            f"the {i % 7} {animals} saw {i % 5} dogs near the {i % 3} old houses"
            for i in range(400)
        ]
        (folder / f"{name}.txt").write_text("\n\n".join(text))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return Site(lab, folder)


@pytest.fixture(scope="module")
def curve(site: Site) -> list[float]:
    """The losses of one process on one machine."""
    site.well("train", "recipe.yaml", "--run-dir", "alone")
    return site.losses("alone")


@pytest.mark.parametrize(
    ("launcher", "slots"),
    [("mpi", (1, 2, 1)), ("torchrun", (1, 1))],
    ids=["mpirun-1-2-1", "torchrun-1-1"],
)
def test_hosts_of_a_file_train_as_one_machine(
    launcher: str, slots: tuple[int, ...], site: Site, curve: list[float]
) -> None:
    """Runs over hosts have one machine's losses, and no forwarded value is in the run folder."""
    lines = [f"host{number} slots={count}" for number, count in enumerate(slots, 1)]
    (site.folder / "hosts").write_text("\n".join(lines) + "\n")
    out = site.well(
        "train", "recipe.yaml", "--hostfile", "hosts", "--launcher", launcher, "--run-dir", launcher
    )
    assert site.losses(launcher) == pytest.approx(curve, abs=1e-5)
    assert f"{sum(slots)} ranks on {len(slots)} hosts" in out
    assert all(f"host{number}: rank" in out for number in range(1, len(slots) + 1))
    assert not leaking(site.folder / launcher)


def test_a_queued_run_trains_as_one_machine(site: Site, curve: list[float]) -> None:
    """A submitted run prints only its job id, trains as one machine, and reports its state."""
    out = site.well(
        "submit",
        "recipe.yaml",
        "--run-dir",
        "queued",
        "launch.nodes=2",
        "launch.processes_per_node=1",
    )
    number = out.strip()
    assert number.isdecimal()
    assert site.well("status", "queued").splitlines()[0].endswith(f"job {number} of slurm)")
    assert "final loss" in site.well("logs", "queued", "--follow")
    assert site.losses("queued") == pytest.approx(curve, abs=1e-5)
    status = json.loads(site.well("status", "queued", "--json"))
    assert (status["state"], status["job"]["backend"], status["job"]["exit_status"]) == (
        "succeeded",
        "slurm",
        0,
    )
    assert site.well("list").splitlines()[1].split()[0] == "succeeded"
    assert not leaking(site.folder / "queued")


def test_a_job_of_ones_own_has_unequal_tasks_and_no_forgotten_srun(
    site: Site, curve: list[float]
) -> None:
    """Two tasks and one task on two hosts train; a batch script without srun is refused."""
    # The global batch must be a multiple of 3 ranks x micro_size 4.
    batch = ("launch.forward=[]", "batch.global_size=12", "batch.micro_size=4", "train.max_steps=2")
    words = [str(COMMAND), "train", "recipe.yaml", *batch, "--run-dir", "uneven"]
    ended = site.lab.run(
        LOGIN, "srun", "--nodes=2", "--ntasks=3", *words, cwd=site.folder, env=site.env, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    hosts = json.loads((site.folder / "uneven" / "plan.json").read_text())["nodes"]
    assert [(host["host"], host["slots"]) for host in hosts] == [("host1", 2), ("host2", 1)]
    wrapped = ("sbatch", "--wait", "--nodes=2", "--ntasks=2", "--output=forgot.out", "--wrap")
    command = f"{COMMAND} train recipe.yaml --run-dir forgot"
    assert site.lab.run(LOGIN, *wrapped, command, cwd=site.folder, env=site.env).returncode == 2
    assert "start all with `srun ortlaunch train ...`" in (site.folder / "forgot.out").read_text()


@contextmanager
def no_secret_on_a_command_line() -> Iterator[None]:
    """Check that no process of any host has the secret in its command line while this is open."""
    found = set[str]()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            # Hosts' process namespaces are below this machine's, so one ps lists all processes.
            listed = subprocess.run(
                ["ps", "-eo", "args="], capture_output=True, text=True, check=False
            ).stdout
            found.update(line for line in listed.splitlines() if SECRET in line)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert not found


def leaking(folder: Path) -> list[str]:
    """Return the files of a run that contain the secret."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]

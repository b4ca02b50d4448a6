"""Time the start of 2 processes: ortlaunch, torchrun, accelerate, deepspeed.

    python benchmarks/launch.py [--rounds N] [--hosts]

--hosts: on two hosts of a lab of its own (tests/cluster/lab.py: root, Debian's packages), beside
mpirun, and torchrun started by hand through ssh on each. ortlaunch checks the hosts first
(launch.preflight).

The time is from the command to the first line of the ranks' program. The peers start a script that
imports nothing heavy and writes the time. ortlaunch starts its real worker, whose first act is to
open the rank's logs. Each time is that of the later of the two ranks; interleaved, medians.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.lab import LOGIN, Lab, lacking

BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # deepspeed's launcher looks for its python there
SCRIPT = """
import os, sys, time
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
open(os.path.join(sys.argv[-1], rank), "w").write(repr(time.time()))
"""
MODULE = """
import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sum()


def model():
    return Net(1, 1)


def data():
    return [{"x": torch.ones(1)}] * 4
"""
RECIPE = """
name: launch
model: {task: custom, factory: "net:model"}
data: {train: {format: custom, factory: "net:data"}}
batch: {micro_size: 1, accumulation_steps: 1}
optimizer: {name: sgd, learning_rate: 0.1}
engine: {name: eager}
train: {max_steps: 1}
"""
_PLAIN = ("--mixed_precision=no", "--dynamo_backend=no")
OWN = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
OURS = {
    f"ortlaunch, {name}": [f"--launcher={name}", "--nproc-per-node=2"]
    for name in ("torchrun", "mpi")
}
OURS_ON_HOSTS = {
    f"ortlaunch, {name}": [f"--launcher={name}", "--hostfile=hosts"] for name in ("torchrun", "mpi")
}
PEERS = {
    "torchrun": (str(BIN / "torchrun"), "--nproc-per-node=2"),
    "accelerate": (
        str(BIN / "accelerate"),
        "launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        *_PLAIN,
    ),
    "deepspeed": (str(BIN / "deepspeed"), "--num_accelerators=2"),
}


Run = Callable[[list[str], Path], "subprocess.CompletedProcess[str]"]


def main() -> int:
    """Run the launchers in turn and print their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", action="store_true")
    asked = parser.parse_args()
    if not asked.hosts:
        return measure(
            asked.rounds, here, OURS, {name: list(command) for name, command in PEERS.items()}
        )
    # A lab needs root and Debian's packages.
    lack = lacking()
    if lack:
        raise SystemExit(f"no lab: {lack}")
    with Lab(hosts=2) as lab:
        return measure(asked.rounds, functools.partial(there, lab), OURS_ON_HOSTS, peers_on_hosts())


def measure(rounds: int, run: Run, ours: dict[str, list[str]], peers: dict[str, list[str]]) -> int:
    """Run all launchers in turns, and print the table."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        hosts = "host1 slots=1\nhost2 slots=1\n"
        for name, text in (
            ("script.py", SCRIPT),
            ("net.py", MODULE),
            ("recipe.yaml", RECIPE),
            ("hosts", hosts),
        ):
            (folder / name).write_text(text)
        times: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
        for turn in range(rounds + 1):
            for name, found in times.items():
                seconds = (
                    first_line(run, ours[name], folder)
                    if name in ours
                    else peer(run, peers[name], folder)
                )
                # The first turn reads from disk, the others from its cache.
                if turn:
                    found.append(seconds)
    report(times, statistics.median(times["torchrun"]))
    return 0


def report(times: dict[str, list[float]], base: float) -> None:
    """Print a line for each launcher, relative to torchrun."""
    print(f"load of this machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    head = (
        "| from the command to the later rank's first line | s, median (least - most) | "
        "torchrun + s | x torchrun |"
    )
    print(f"{head}\n|---|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found)
        ratio = f"{median - base:+.2f} | {median / base:.2f}"
        print(f"| {name} | {median:.2f} ({min(found):.2f} - {max(found):.2f}) | {ratio} |")


def peers_on_hosts() -> dict[str, list[str]]:
    """Return the command that a user types without ortlaunch."""
    mpirun = [
        str(BIN / "mpirun"),
        "-n",
        "2",
        "--hostfile",
        "hosts",
        "--map-by",
        "slot",
        "--bind-to",
        "none",
    ]
    options = "--nnodes=2 --nproc-per-node=1 --master-addr=host1 --master-port=29511"
    torchrun = [f'ssh host{1 + rank} "cd $PWD && {BIN}/torchrun {options} '
                f'--node-rank={rank} script.py times"'
                for rank in (0, 1)]  # fmt: skip
    return {
        "torchrun": ["sh", "-c", f"{torchrun[0]} & {torchrun[1]}; wait $!"],
        "mpirun": [*mpirun, "--prefix", sys.prefix, sys.executable, "script.py", "times"],
    }


def first_line(run: Run, options: list[str], folder: Path) -> float:
    """Return the seconds of an `ortlaunch train` to the later rank's first line."""
    # Otherwise the run would be continued.
    shutil.rmtree(folder / "run", ignore_errors=True)
    started = timed(
        run, [str(BIN / "ortlaunch"), "train", "recipe.yaml", *options, "--run-dir=run"], folder
    )
    return max(born(folder / f"run/logs/rank_0000{rank}.err") for rank in (0, 1)) - started


def born(path: Path) -> float:
    """Return the creation time of a file, which later writes do not change."""
    told = subprocess.run(
        ["stat", "--format=%w", path], capture_output=True, text=True, check=True
    ).stdout
    if told.startswith("-"):
        raise SystemExit(f"{path}: this file system does not tell when a file was made")
    # stat prints nanoseconds, and a zone such as +0200; fromisoformat of Python 3.10 reads neither.
    day, clock, zone = told.split()
    return datetime.fromisoformat(f"{day} {clock[:15]}{zone[:3]}:{zone[3:]}").timestamp()


def peer(run: Run, command: list[str], folder: Path) -> float:
    """Return the seconds of a script to the later rank's first line."""
    shutil.rmtree(folder / "times", ignore_errors=True)
    (folder / "times").mkdir()
    started = timed(run, command, folder)
    return max(float((folder / "times" / rank).read_text()) for rank in "01") - started


def timed(run: Run, command: list[str], folder: Path) -> float:
    """Run a command, which must succeed, and return its start time."""
    # Wall-clock time, because files and scripts of other processes are compared with it.
    started = time.time()
    ended = run(command, folder)
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)}: status "
            f"{ended.returncode}\n{ended.stdout[-1000:]}\n{ended.stderr[-2000:]}"
        )
    return started


def here(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run on this machine."""
    environ = {**os.environ, "PATH": PATH, **OWN}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False
    )


def there(lab: Lab, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run on the lab's login node."""
    return lab.run(LOGIN, *command, cwd=folder, env={**lab.environ, **OWN}, timeout=180)


if __name__ == "__main__":
    sys.exit(main())

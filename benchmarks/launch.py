"""From the command to the first line of the ranks' program: ortlaunch, torchrun, accelerate, deepspeed; 2 processes.

python benchmarks/launch.py [--rounds N]

The peers start a script that imports nothing heavy and writes the time. ortlaunch starts its real worker, whose first
act is to open the rank's logs. Each time is that of the later of the two ranks; interleaved, medians.
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
from pathlib import Path

BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # deepspeed's launcher looks for its python there
SCRIPT = "import os, sys, time\nopen(os.path.join(sys.argv[-1], os.environ['RANK']), 'w').write(repr(time.time()))\n"
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
PEERS = {
    "torchrun": ("torchrun", "--nproc-per-node=2"),
    "accelerate": ("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", *_PLAIN),
    "deepspeed": ("deepspeed", "--num_accelerators=2"),
}


def main() -> int:
    """Run the launchers in turn and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    launchers: dict[str, Callable[[Path], float]] = {
        "ortlaunch, torchrun": functools.partial(ours, "torchrun"),
        "ortlaunch, mpirun": functools.partial(ours, "mpi"),
        **{name: functools.partial(peer, command) for name, command in PEERS.items()},
    }
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for name, text in (("script.py", SCRIPT), ("net.py", MODULE), ("recipe.yaml", RECIPE)):
            (folder / name).write_text(text)
        times: dict[str, list[float]] = {name: [] for name in launchers}
        for turn in range(rounds + 1):
            for name, launch in launchers.items():
                seconds = launch(folder)
                if turn:  # the first one reads from disk
                    times[name].append(seconds)
    base = statistics.median(times["torchrun"])
    print(
        "| from the command to the later rank's first line | s, median (least - most) | torchrun + s |\n|---|---|---|"
    )
    for name, found in times.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.2f} ({min(found):.2f} - {max(found):.2f}) | {median - base:+.2f} |")
    return 0


def ours(launcher: str, folder: Path) -> float:
    """Seconds to the later rank's first line, of a whole `ortlaunch train`."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    options = [f"--launcher={launcher}", "--nproc-per-node=2", "--run-dir=run"]
    started = _run([str(BIN / "ortlaunch"), "train", "recipe.yaml", *options], folder)
    logs = [(folder / f"run/logs/rank_0000{rank}.err").stat() for rank in (0, 1)]
    assert not any(log.st_size for log in logs), "a rank wrote errors, so its log's time is not that of its first line"
    return max(log.st_ctime for log in logs) - started


def peer(command: tuple[str, ...], folder: Path) -> float:
    """Seconds to the later rank's first line, of a script."""
    shutil.rmtree(folder / "times", ignore_errors=True)
    (folder / "times").mkdir()
    started = _run([str(BIN / command[0]), *command[1:], "script.py", "times"], folder)
    return max(float((folder / "times" / rank).read_text()) for rank in "01") - started


def _run(command: list[str], folder: Path) -> float:
    started = time.time()
    environ = {**os.environ, "PATH": PATH, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False)
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)}: status {ended.returncode}\n{ended.stdout[-1000:]}\n{ended.stderr[-2000:]}"
        )
    return started


if __name__ == "__main__":
    sys.exit(main())

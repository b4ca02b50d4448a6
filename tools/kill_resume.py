"""Kill a whole run with SIGKILL again and again, start it again each time, and compare with one that nobody killed.

    python tools/kill_resume.py --kills 100

A toy on two ranks with ZeRO 1 and a checkpoint every two steps. About half of the kills wait for a `.partial` folder.
Each restart must take the newest complete checkpoint; final weights, checkpoint and losses must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import warm
import yaml

from ortlaunch.process import descendants_of
from ortlaunch.run_folder.folder import RunDir

MODULE = '''
import time
import torch
from torch import nn


class Net(nn.Module):
    """Large enough that a checkpoint takes a moment; with dropout, so that a wrong seed is seen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 1024), nn.GELU(), nn.Dropout(0.2), nn.Linear(1024, 1024), nn.Linear(1024, 1)
        )

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()


class Data:
    """Read as slowly as real data, so that there is time to kill."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        time.sleep(0.005)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum().reshape(1)}


def net():
    return Net()


def data():
    return Data()
'''
STEPS_A_KILL = 6  # more than a life makes on average, so that the run does not end before its last kill
TIMEOUT = 300


def recipe(engine: str, kills: int) -> dict[str, Any]:
    """The toy's."""
    return {
        "name": "killed",
        "model": {"task": "custom", "factory": "killed_toy:net"},
        "data": {"train": {"format": "custom", "factory": "killed_toy:data"}},
        "batch": {"global_size": 16, "micro_size": 8},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "engine": {"name": engine, **({"parity_steps": 0} if engine == "ort" else {})},
        "zero": {"stage": 1},
        "train": {"max_steps": max(12, STEPS_A_KILL * kills)},
        "checkpoint": {"every_steps": 2, "every_minutes": None, "keep": 2},
        "log": {"every_steps": 1},
    }


class Life:
    """One start of a run."""

    def __init__(self, home: Path, name: str, recipe: str = "killed.yaml", ranks: int = 2, *words: str) -> None:
        self.run, self.log = RunDir(home / name), home / f"{name}.log"
        self.newest = self.complete()[-1] if self.complete() else 0
        self.process = warm.start(home, self.log, ranks, ["train", recipe, f"--run-dir={name}", *words])
        self.deadline = time.monotonic() + TIMEOUT
        self.family: list[int] = []

    def complete(self) -> list[int]:
        return [step for step, _ in self.run.complete_checkpoints()]

    def wait_for(self, what: str) -> None:
        """Until there is a new checkpoint, or one that is being written."""
        while self.process.poll() is None and time.monotonic() < self.deadline:
            if any(self.run.checkpoints.glob("step_*.partial")) if what == "partial" else self.advanced():
                return
            time.sleep(0.0005)
        raise SystemExit(f"waited in vain for {what}:\n{self.log.read_text()[-3000:]}")

    def advanced(self) -> bool:
        found = self.complete()
        return bool(found) and found[-1] > self.newest

    def look(self) -> list[int]:
        """All of its processes."""
        self.family = [self.process.pid, *descendants_of(self.process.pid)]
        return self.family

    def kill(self) -> None:
        """All of its processes, at once; none is left."""
        pids = self.family or self.look()
        for pid in pids:  # without looking again, which would take longer than a checkpoint
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(TIMEOUT)
        while any(_lives(pid) for pid in pids) and time.monotonic() < self.deadline:
            time.sleep(0.01)

    def end(self) -> None:
        """Run to its end."""
        if self.process.wait(TIMEOUT + 30 * 60) != 0:
            raise SystemExit(f"the run failed:\n{self.log.read_text()[-3000:]}")

    def resumed_after(self) -> int:
        """The step that it went on from, by its own words; 0: it began."""
        found = re.search(r"^resumed after step (\d+) from", self.log.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def one_kill(home: Path, number: int, chance: random.Random) -> dict[str, Any]:
    """A life that ends by SIGKILL: while a checkpoint is written, between two, or while it starts."""
    how = ["partial", "between", "partial", "between", "partial", "partial", "between", "starting"][number % 8]
    life, before = Life(home, "killed"), number and RunDir(home / "killed").complete_checkpoints()
    if how == "starting":
        time.sleep(chance.uniform(0.1, 4.0))
    else:
        life.wait_for("complete")  # so that each life gets on
        life.look()
        if how == "partial":
            life.wait_for("partial")
        time.sleep(chance.uniform(0, 0.01 if how == "partial" else 0.4))
    life.kill()
    if life.process.returncode != -signal.SIGKILL:
        raise SystemExit(f"kill {number}: the run had ended with {life.process.returncode} before it was killed")
    resumed = life.resumed_after()
    expected = before[-1][0] if before else 0
    if resumed != expected and not (how == "starting" and resumed == 0):
        raise SystemExit(f"kill {number}: went on from step {resumed}, and {expected} was the newest complete one")
    partial = any(life.run.checkpoints.glob("step_*.partial"))
    return {"kill": number + 1, "how": how, "partial": partial, "from": resumed, "complete": life.complete()}


def differences(one: RunDir, other: RunDir) -> list[str]:
    """What is not the same, bit for bit, as in the `one` that nobody stopped."""
    last = one.complete_checkpoints()[-1][1].name
    names = [path.relative_to(one.path) for path in (one.checkpoints / last).glob("*.safetensors")]
    names.append(Path("export/model.safetensors"))
    found = [str(name) for name in names if (one.path / name).read_bytes() != (other.path / name).read_bytes()]
    return found + (["losses"] if losses(one) != losses(other) else [])


def losses(run: RunDir) -> list[tuple[int, float]]:
    """(step, loss) of every step."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def prove(home: Path, kills: int, engine: str, seed: int) -> dict[str, Any]:
    """Both runs in a folder; what was seen."""
    (home / "killed_toy.py").write_text(MODULE)
    (home / "killed.yaml").write_text(yaml.safe_dump(recipe(engine, kills)))
    warm.load()
    chance, began = random.Random(seed), time.time()
    seen = []
    for number in range(kills):
        seen.append(one_kill(home, number, chance))
        print(json.dumps(seen[-1]), flush=True)
    Life(home, "killed").end()
    Life(home, "straight").end()
    damaged = "is damaged" in (home / "killed.log").read_text()
    return {
        "kills": kills,
        "while a checkpoint was written": sum(each["partial"] for each in seen),
        "differ": differences(RunDir(home / "straight"), RunDir(home / "killed")) + (["damaged"] if damaged else []),
        "seconds": round(time.time() - began),
    }


def main() -> int:
    """Exit status 0: all is equal, and enough kills met a half written checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--engine", default="ort", choices=("ort", "eager"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="kept; a temporary one by default")
    asked = parser.parse_args()
    home = asked.folder or Path(tempfile.mkdtemp(prefix="kill-resume-"))
    home.mkdir(parents=True, exist_ok=True)
    found = prove(home.absolute(), asked.kills, asked.engine, asked.seed)
    print(json.dumps(found))
    if asked.folder is None:
        shutil.rmtree(home)
    return 0 if not found["differ"] and found["while a checkpoint was written"] >= 0.3 * asked.kills else 1


if __name__ == "__main__":
    sys.exit(main())

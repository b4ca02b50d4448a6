"""Runs that stand still, that are killed, that fail the same way twice: what the command says, and what is left.

python benchmarks/supervision.py [--launchers torchrun,mpi] [--parts stalls,kills,twice] [--kills 3]

stalls: SIGSTOP of a rank, of a rank with its guardian, a rank that sleeps, one in a collective of its own, a data
factory and a sample that hang: seconds until the verdict beyond train.stall_seconds, whom it names, what is alive
10 s later. kills: kill -9 of a rank at random moments under launch.max_restarts: weights beside those of a run that
nobody killed. twice: a rank that always raises at step 7. Exit status 1 where one is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from victim import Victim, processes, wait

STALL_SECONDS, MORE_SECONDS = 5, 5.0
MODULE = """
import os, signal, time, torch, torch.distributed as dist

MINE = lambda: os.environ.get("RANK", "0") == "1"

class Net(torch.nn.Module):
    def __init__(self, how, step, pause):
        super().__init__()
        self.layer, self.how, self.step, self.pause, self.passes = torch.nn.Linear(4, 1), how, step, pause, 0

    def forward(self, x, y):
        self.passes += 1
        time.sleep(self.pause)
        if MINE() and self.passes == self.step:
            self.act()
        return ((self.layer(x) - y) ** 2).mean()

    def act(self):
        here = os.path.dirname(__file__)
        if self.how:
            open(os.path.join(here, "began"), "w").write(str(time.time()))
        if self.how == "raise":
            raise ValueError("planted")
        if self.how == "guardian":
            os.kill(os.getppid(), signal.SIGSTOP)
        if self.how in ("stop", "guardian"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "sleep":
            time.sleep(1000)
        if self.how == "collective":
            dist.barrier()

class Data:
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if self.how == "sample" and MINE() and i == 20:
            open(os.path.join(os.path.dirname(__file__), "began"), "w").write(str(time.time()))
            time.sleep(1000)
        return {"x": torch.ones(4) * i / 64, "y": torch.ones(1)}

def model(how="", step=7, pause=0.0):
    return Net(how, step, pause)

def data(how=""):
    if how == "factory" and MINE():
        open(os.path.join(os.path.dirname(__file__), "began"), "w").write(str(time.time()))
        time.sleep(1000)
    return Data(how)
"""
RECIPE = {
    "name": "supervised",
    "model": {"task": "custom", "factory": "supervised_model:model"},
    "data": {"train": {"format": "custom", "factory": "supervised_model:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "engine": {"name": "eager"},
    "train": {"max_steps": 40, "stall_seconds": STALL_SECONDS},
    "log": {"every_steps": 1},
    "checkpoint": {"every_steps": 4},
}
IN_DATA = ("factory", "sample")
STALLS = ("stop", "guardian", "sleep", "collective", *IN_DATA)


class Run(Victim):
    """One command in a folder of its own."""

    def __init__(self, folder: Path, launcher: str, **arguments: object) -> None:
        folder.mkdir(parents=True)
        how = arguments.pop("how", "")
        recipe = {**RECIPE, **arguments}
        kind, part = ("data", recipe["data"]["train"]) if how in IN_DATA else ("model", recipe["model"])
        part = {**part, "arguments": {**part.get("arguments", {}), "how": how}}
        recipe[kind] = {"train": part} if kind == "data" else part
        (folder / "supervised_model.py").write_text(MODULE)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        super().__init__(folder, ("--nproc-per-node", "2", "--launcher", launcher), dict(os.environ))

    def lines(self) -> list[str]:
        return (self.folder / "output").read_text(errors="replace").splitlines()

    def finish(self, seconds: float) -> int:
        """Its status, or -1."""
        wait(lambda: self.command.poll() is not None, seconds)
        status = self.command.poll()
        return -1 if status is None else status

    def left(self, seconds: float = 10.0) -> list[int]:
        """What is alive after so long, and ends it."""
        wait(lambda: not processes(self.run), seconds, 0.2)
        there = list(processes(self.run))
        self.end()
        return there


def main() -> int:
    options = _options()
    random.seed(options.seed)
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        for launcher in options.launchers.split(","):
            for part in options.parts.split(","):
                folder = Path(place) / launcher / part
                for good, line in PARTS[part](folder, launcher, options):
                    wrong += not good
                    print(f"{'ok  ' if good else 'BAD '} {launcher}: {line}", flush=True)
    return int(wrong > 0)


def stalls(folder: Path, launcher: str, _: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Seconds from the moment to the verdict on the terminal."""
    for how in STALLS:
        run = Run(folder / how, launcher, how=how)
        verdict = _wait_for_verdict(run, 150)
        began = float((run.folder / "began").read_text()) if (run.folder / "began").exists() else 0.0
        took, status = time.time() - began, run.finish(60)
        left, line = run.left(), verdict or "no verdict"
        stacks = (run.run / "errors" / "stall.json").exists() and '"traceback": ""' not in (
            run.run / "errors" / "stall.json"
        ).read_text()
        good = "rank 1 on host" in line and took <= STALL_SECONDS + MORE_SECONDS and status == 124 and not left
        yield (
            good and (stacks or how == "guardian"),
            f"{how}: verdict after {took:.1f} s, status {status}, left {left}, stack {stacks}: {line}",
        )


def _wait_for_verdict(run: Run, seconds: float) -> str:
    found = lambda: [line for line in run.lines() if "has stood still" in line]  # noqa: E731
    wait(lambda: found() or run.command.poll() is not None, seconds, 0.1)
    return next(iter(found()), "")


def kills(folder: Path, launcher: str, options: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Weights of a run that was killed again and again, beside one that was not."""
    pause = {"model": {**RECIPE["model"], "arguments": {"pause": 0.5}}, "launch": {"max_restarts": 3}}  # type: ignore[dict-item]
    whole = Run(folder / "whole", launcher)
    status = whole.finish(200)
    yield status == 0, f"never killed: status {status}"
    run, killed = Run(folder / "killed", launcher, **pause), 0
    while run.command.poll() is None and killed < options.kills:
        time.sleep(random.uniform(8.0, 32.0))
        ranks = run.ranks()
        if ranks:
            os.kill(random.choice(ranks).pid, signal.SIGKILL)
            killed += 1
    status, left = run.finish(300), run.left()
    names = [f"{one.folder}/run/export/model.safetensors" for one in (whole, run)]
    same = all(map(os.path.exists, names)) and len({Path(name).read_bytes() for name in names}) == 1
    told = [line for line in run.lines() if "restart" in line]
    yield (
        status == 0 and same and not left,
        f"{killed} kills: status {status}, same weights {same}, left {left}: {told}",
    )


def twice(folder: Path, launcher: str, _: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """A rank that raises in step 7, always."""
    run = Run(folder, launcher, how="raise", launch={"max_restarts": 3}, checkpoint={"every_steps": 100})
    status, left = run.finish(200), run.left()
    last = run.lines()[-1]
    attempts = sorted(path.name for path in (run.run / "attempts").glob("*"))
    good = status == 1 and "deterministic" in last and "after step 6" in last and attempts == ["1"] and not left
    yield good, f"always raises at step 7: status {status}, kept {attempts}, left {left}: {last}"


PARTS = {"stalls": stalls, "kills": kills, "twice": twice}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", default="torchrun,mpi")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""kill -9 of each process of a run at ten moments, ranks that ignore SIGTERM, stopped ones: what is left, and how long.

python benchmarks/ends.py [--launchers torchrun,mpi] [--victims command,launcher,guardian,rank] [--moments 0,5]

Each case is a run of two ranks of a tiny model on engine eager. A line for each: the command's status and how long it
lived on, how long any process of the run did, and what the command said. Exit status 1 where one was left after 15 s,
or where the command ended before its ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT_SECONDS = 15.0
MODULE = """
import os, signal, time, torch

class Net(torch.nn.Linear):
    def __init__(self, ignores):
        super().__init__(4, 1)
        self.ignores, self.passes = ignores, 0

    def forward(self, x, y):
        if self.ignores:
            signal.signal(signal.SIGTERM, lambda *_: None)
        self.passes += 1
        open(os.path.join(os.path.dirname(__file__), f"inside_{os.environ['RANK']}"), "w").write(str(self.passes))
        time.sleep(0.02)
        return ((super().forward(x) - y) ** 2).mean()

def model(ignores=False):
    return Net(ignores)

def data():
    return [{"x": torch.ones(4) * i, "y": torch.ones(1)} for i in range(64)]
"""
RECIPE = """
name: ends
model: {{task: custom, factory: "ends_model:model", arguments: {{ignores: {ignores}}}}}
data: {{train: {{format: custom, factory: "ends_model:data"}}}}
batch: {{micro_size: 2, accumulation_steps: 1}}
optimizer: {{name: adamw, learning_rate: 1e-6}}
engine: {{name: eager}}
train: {{max_steps: {steps}}}
checkpoint: {{every_steps: 2}}
log: {{every_steps: 1}}
"""
WORKER = re.compile(r" ortlaunch\.worker ")
HEAD = "| | launcher | kill -9 of | moment | status | command ended | all gone | said |"


class Process(NamedTuple):
    """What /proc says of one."""

    pid: int
    parent: int
    state: str
    words: str


def processes(folder: Path) -> list[Process]:
    """Living processes with the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if str(folder) in words and state != "Z":
            found.append(Process(int(path.name), int(parent), state, words))
    return found


class Run:
    """One run, and who is who in it."""

    def __init__(self, folder: Path, launcher: str, ignores: bool, steps: int) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "ends_model.py").write_text(MODULE)
        (folder / "recipe.yaml").write_text(RECIPE.format(ignores=str(ignores).lower(), steps=steps))
        words = ["train", "recipe.yaml", "--nproc-per-node", "2", "--launcher", launcher, "--run-dir", str(self.run)]
        self.output = open(folder / "output", "wb")  # noqa: SIM115
        self.command = subprocess.Popen(
            [sys.executable, "-m", "ortlaunch.cli", *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def who(self, victim: str) -> int | None:
        """The process that a word names; of two guardians and two ranks that of rank 1, where it can be told."""
        if victim == "command":
            return self.command.pid
        here = processes(self.folder)
        if victim == "launcher":
            return next((one.pid for one in here if self._launches(one)), None)
        workers = {one.pid: one for one in here if WORKER.search(one.words) and not self._launches(one)}
        ranks = [one for one in workers.values() if one.parent in workers]
        guardians = {one.parent for one in ranks} if victim == "rank" or ranks else set(workers)
        pids = [one.pid for one in ranks] if victim == "rank" else sorted(guardians)
        return max(pids, default=None)

    def found(self, victim: str) -> int:
        """The same, waited for: between fork and exec a process has another's command line, or none."""
        found: list[int] = []
        wait(lambda: found.extend(pid for pid in [self.who(victim)] if pid) or found, 10, 0)
        return found[0]

    def _launches(self, one: Process) -> bool:
        return one.parent == self.command.pid and one.pid != self.command.pid

    def steps(self) -> int:
        """Optimizer steps that are in its metrics."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(not (path / "COMPLETE").exists() for path in (self.run / "checkpoints").glob("step_*"))

    def said(self) -> str:
        """The last line of the command's own."""
        text = (self.folder / "output").read_text(errors="replace")
        return (re.findall("ortlaunch: .*", text) or ["(nothing)"])[-1]


def wait(until: Callable[[], object], seconds: float, every: float = 0.005) -> bool:
    """Wait for it; whether it came."""
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def _after(seconds: float) -> Callable[[Run, str], bool]:
    def come(run: Run, victim: str) -> bool:
        found = wait(lambda: run.who(victim), 60, 0)
        time.sleep(seconds)
        return found

    return come


MOMENTS: dict[str, Callable[[Run, str], bool]] = {
    "at once": _after(0),
    "0.05 s old": _after(0.05),
    "0.2 s old": _after(0.2),
    "0.5 s old": _after(0.5),
    "first worker": lambda run, _: wait(lambda: run.who("guardian"), 60, 0),
    "group joined": lambda run, _: wait((run.run / "engine.json").exists, 90),
    "first pass": lambda run, _: wait((run.folder / "inside_1").exists, 90),
    "step 3": lambda run, _: wait(lambda: run.steps() >= 3, 90),
    "in a save": lambda run, _: wait(run.saving, 90, 0),
    "export": lambda run, _: wait((run.run / "export").exists, 90, 0),
}


def cases(launchers: list[str], victims: list[str], moments: list[int]) -> Iterator[tuple[str, str, str, str]]:
    """(launcher, victim, moment, what is special) of every case."""
    names = list(MOMENTS)
    for launcher in launchers:
        for victim in victims:
            yield from ((launcher, victim, names[moment], "") for moment in moments)
        for special in ("ignores SIGTERM", "rank stopped", "guardian stopped"):
            yield from (
                (launcher, victim, "step 3", special) for victim in ("command", "launcher") if victim in victims
            )


def play(launcher: str, victim: str, moment: str, special: str) -> bool:
    """One case, its line printed; whether nothing was left."""
    with tempfile.TemporaryDirectory(prefix="ends-") as name:
        folder = Path(name)
        run = Run(folder, launcher, special == "ignores SIGTERM", 10 if moment == "export" else 100_000)
        try:
            came = MOMENTS[moment](run, victim)
            if special.endswith("stopped"):
                os.kill(run.found(special.partition(" ")[0]), signal.SIGSTOP)
                time.sleep(0.3)
            if not came:
                print(f"| {launcher} | {victim} | {moment} | never came: {run.said()}", flush=True)
                return False
            os.kill(run.found(victim), signal.SIGKILL)
            return _judge(run, " | ".join((launcher, victim, f"{moment} {special}".strip())))
        finally:
            run.command.kill()
            for left in processes(folder):
                os.kill(left.pid, signal.SIGKILL)


def _judge(run: Run, case: str) -> bool:
    begun = time.monotonic()
    ended = gone = None
    while (ended is None or gone is None) and time.monotonic() - begun < LIMIT_SECONDS + 10:
        left = processes(run.folder)
        passed = time.monotonic() - begun
        if ended is None and run.command.poll() is not None:
            ended, beside = passed, len([one for one in left if one.pid != run.command.pid])
        if gone is None and not left:
            gone = passed
        time.sleep(0.02)
    status, killed = run.command.poll(), run.command.poll() == -signal.SIGKILL
    alone = killed or (ended is not None and (gone or 99.0) <= ended + 0.2)
    good = gone is not None and gone <= LIMIT_SECONDS and alone
    times = " | ".join("never" if at is None else f"{at:.1f} s" for at in (ended, gone))
    verdict = "" if killed else re.sub(str(run.folder), "", run.said())[:150]
    left_over = f" LEFT {len(processes(run.folder))}" if gone is None else "" if alone else f" {beside} BESIDE"
    print(f"| {'ok ' if good else 'BAD'} | {case} | {status} | {times} |{left_over} {verdict}", flush=True)
    return good


def main() -> None:
    """The table, and its sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", default="torchrun,mpi")
    parser.add_argument("--victims", default="command,launcher,guardian,rank")
    parser.add_argument("--moments", default=",".join(map(str, range(len(MOMENTS)))), help="numbers of the ten")
    parser.add_argument("--special", action="store_true", help="only ranks that ignore SIGTERM and stopped processes")
    asked = parser.parse_args()
    moments = [] if asked.special else [int(moment) for moment in asked.moments.split(",")]
    print(f"{HEAD}\n|{'---|' * 8}")
    done = [play(*case) for case in cases(asked.launchers.split(","), asked.victims.split(","), moments)]
    print(f"{sum(done)} of {len(done)} left nothing after {LIMIT_SECONDS:.0f} s")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()

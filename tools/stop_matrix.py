"""Stop runs by every signal, at every moment, under every launcher: seconds to COMPLETE, exit status, steps lost.

python tools/stop_matrix.py [--launchers local,torchrun,mpi] [--signals TERM,INT,USR1,stop] [--targets command,...]
                            [--moments import,...] [--out FILE]

A case is one run: the signal goes to its target at its moment; then what became of it. Lost are steps that were taken
before the signal and are not in the newest checkpoint. Exit status 1 where a case is not as docs/ends.md says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULE = """
import os, time, torch

HERE = os.path.dirname(__file__)

def at(moment):
    if os.environ.get("RANK", "0") == "0":
        open(os.path.join(HERE, "at_" + moment), "w").close()

class Net(torch.nn.Linear):
    def __init__(self, seconds):
        super().__init__(4, 1)
        self.seconds, self.passes = seconds, 0

    def forward(self, x, y):
        if not self.training:
            at("evaluation")
        else:
            self.passes += 1
            at("step") if self.passes > 4 and self.passes % 3 == 1 else None
            at("accumulation") if self.passes > 4 and self.passes % 3 == 2 else None
        time.sleep(self.seconds)
        return ((super().forward(x) - y) ** 2).mean()


def model(seconds=0.1, build=0.0):
    at("build")
    time.sleep(build)
    return Net(seconds)

def data(reading=0.0):
    at("tokenizing")
    time.sleep(reading)
    return [{"x": torch.ones(4) * i / 64, "y": torch.ones(1)} for i in range(64)]
"""
RECIPE = """
name: stop
model: {{task: custom, factory: "stop_model:model", arguments: {{build: {build}}}}}
data:
  train: {{format: custom, factory: "stop_model:data", arguments: {{reading: {reading}}}}}
  evaluation: {{format: custom, factory: "stop_model:data"}}
batch: {{micro_size: 2, accumulation_steps: 3}}
optimizer: {{name: adamw, learning_rate: 1e-3}}
engine: {{name: {engine}}}
train: {{max_steps: 100000, evaluate_every_steps: {evaluate}}}
checkpoint: {{every_steps: {every}}}
log: {{every_steps: 1}}
"""
MOMENTS = ("import", "tokenizing", "export", "step", "accumulation", "save", "evaluation")
EARLY = ("import", "tokenizing", "export")
TARGETS = ("command", "launcher", "guardian", "rank")
WORKER = re.compile(r" ortlaunch\.worker ")
HEAD = "| launcher | signal | to | during | status | ended (s) | COMPLETE (s) | steps before | saved | lost | |"


class Case(NamedTuple):
    """One run to stop."""

    launcher: str
    signal: str
    target: str
    moment: str

    @property
    def dies(self) -> bool:
        """Whether mpirun itself is told to end, which kills its ranks."""
        return self.launcher == "mpi" and self.target == "launcher" and self.signal in ("TERM", "INT")

    @property
    def expected(self) -> tuple[int, ...]:
        """The exit statuses that are right."""
        number = getattr(signal, f"SIG{self.signal}", signal.SIGUSR1)
        if self.dies:
            return (128 + number, 85, 130)  # 85, 130: before the first step, ranks end by themselves in time
        return (130,) if self.signal == "INT" else (85,)


def processes(folder: Path) -> dict[int, tuple[int, str]]:
    """pid -> (parent, command line) of living processes with the folder in their command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if str(folder) in words and state != "Z":
            found[int(path.name)] = (int(parent), words)
    return found


class Run:
    """One run, started as a user does."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.run, self.case = folder, folder / "run", case
        (folder / "stop_model.py").write_text(MODULE)
        values = {
            "build": 0.0, "reading": 30 if case.moment == "tokenizing" else 0,
            "engine": "ort" if case.moment == "export" else "eager",
            "evaluate": 3 if case.moment == "evaluation" else 100000,
            "every": 2 if case.moment == "save" else 100000,
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(RECIPE.format(**values))
        ranks = "1" if case.launcher == "local" else "2"
        words = ["train", "recipe.yaml", "--nproc-per-node", ranks, "--launcher", case.launcher, "--run-dir", self.run]
        self.output = open(folder / "output", "wb")  # noqa: SIM115
        self.command = subprocess.Popen(
            [sys.executable, "-m", "ortlaunch.cli", *map(str, words)], cwd=folder, stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=self.output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def is_at(self, moment: str) -> bool:
        """Whether it is at this moment now."""
        if moment == "import":
            return len(self.ranks()) >= (1 if self.case.launcher == "local" else 2)
        if moment == "export":
            log = self.run / "logs" / "rank_00000.out"
            return (self.folder / "at_build").exists() and log.exists()
        if moment == "save":
            return any((self.run / "checkpoints").glob("*.partial"))
        return (self.folder / f"at_{moment}").exists()

    def ranks(self) -> list[int]:
        """Processes of ranks, below their guardians; in the order of their ids."""
        workers = {pid: one for pid, one in processes(self.folder).items() if WORKER.search(one[1])}
        return sorted(pid for pid, (parent, words) in workers.items() if self._is_rank(parent, workers))

    @staticmethod
    def _is_rank(parent: int, workers: dict[int, tuple[int, str]]) -> bool:
        return parent in workers and not re.search(r"torch\.distributed\.run|mpirun", workers[parent][1])

    def target(self) -> int:
        """The process that the signal goes to; of ranks the last."""
        if self.case.target == "command":
            return self.command.pid
        here = processes(self.folder)
        if self.case.target == "launcher":
            return next(pid for pid, (parent, _) in here.items() if parent == self.command.pid)
        rank = self.ranks()[-1]
        return rank if self.case.target == "rank" else here[rank][0]

    def steps(self) -> int:
        """Steps that its metrics tell of."""
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def saved(self) -> tuple[int, float]:
        """Step and time of the newest complete checkpoint."""
        marks = sorted((self.run / "checkpoints").glob("step_*/COMPLETE"))
        return (int(marks[-1].parent.name[5:]), marks[-1].stat().st_mtime) if marks else (0, 0.0)

    def send(self) -> None:
        """The signal, or the words of the verb."""
        if self.case.signal == "stop":
            command = [sys.executable, "-m", "ortlaunch.cli", "stop", "--no-wait", str(self.run)]
            subprocess.run(command, check=True, capture_output=True)
        else:
            os.kill(self.target(), getattr(signal, f"SIG{self.case.signal}"))

    def end(self) -> None:
        """Leave nothing."""
        for pid in (self.command.pid, *processes(self.folder)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.output.close()


def wait(condition, seconds: float) -> bool:
    """Whether it comes true within so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def play(case: Case) -> tuple[bool, str]:
    """One case: whether it is right, and its line."""
    with tempfile.TemporaryDirectory(prefix="stop_") as name:
        run = Run(Path(name), case)
        try:
            wait(lambda: run.is_at(case.moment) or run.command.poll() is not None, 120)
            if run.command.poll() is not None or not run.is_at(case.moment):
                said = (Path(name) / "output").read_text(errors="replace").splitlines()[-3:]
                return False, f"| {' | '.join(case)} | never came to that moment: {said} |"
            time.sleep(0.3 if case.moment in ("import", "export") else 0)
            before, sent = run.steps(), time.time()
            run.send()
            try:
                status = run.command.wait(90)
            except subprocess.TimeoutExpired:
                return False, f"| {' | '.join(case)} | did not end in 90 s |"
            took, (step, complete) = time.time() - sent, run.saved()
            left = wait(lambda: not processes(Path(name)), 5)
            lost, saves = max(0, before - step), case.moment not in EARLY
            right = status in case.expected and left and (case.dies or (lost == 0 and (step > 0 or not saves)))
            words = (Path(name) / "output").read_text(errors="replace").strip().splitlines()[-1:]
            when = f"{complete - sent:.2f}" if complete > sent else "-"
            cells = (status, f"{took:.2f}", when, before, step, lost, "" if right else f"WRONG: {words}")
            return right, f"| {' | '.join(case)} | {' | '.join(map(str, cells))} |"
        finally:
            run.end()


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """All that make sense: `stop` has no target, and local no launcher of its own."""
    names = ("launchers", "signals", "targets", "moments")
    for parts in itertools.product(*(getattr(arguments, name) for name in names)):
        case = Case(*parts)
        if case.signal == "stop" and case.target != "command":
            continue
        if case.launcher == "local" and case.target == "launcher":
            continue
        yield case


def main() -> None:
    """Play the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--launchers", type=words, default=["local", "torchrun", "mpi"])
    parser.add_argument("--signals", type=words, default=["TERM", "INT"])
    parser.add_argument("--targets", type=words, default=list(TARGETS))
    parser.add_argument("--moments", type=words, default=list(MOMENTS))
    arguments = parser.parse_args()
    print(HEAD, "|---" * 11 + "|", sep="\n", flush=True)
    good = []
    for case in cases(arguments):
        right, line = play(case)
        good.append(right)
        print(line, flush=True)
    print(f"\n{sum(good)} of {len(good)} as docs/ends.md says")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()

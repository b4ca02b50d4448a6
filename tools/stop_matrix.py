"""End runs by every signal, at every moment, under every launcher: seconds to COMPLETE and to the last process's end.

python tools/stop_matrix.py [--launchers local,torchrun,mpi,srun] [--signals TERM,INT,USR1,stop,KILL] [--targets ...]
                            [--moments import,...] [--each 3] [--jobs 1]

A case is one run: the signal goes to its target at its moment; then what became of it. Lost are steps that were taken
before the signal and are not in the newest checkpoint. KILL goes also to what started ranks that ignore
SIGTERM, a stopped rank, or a rank whose guardian is stopped. `--each 3`: as few cases as have each three of launcher,
signal, target and moment once, `--each 2` each two. srun takes root and the packages of tests/cluster/lab.py. Exit
status 1 where a case is not as docs/ends.md says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from victim import TRAIN, Victim, processes, wait

ROOT = Path(__file__).resolve().parents[1]
MODULE = """
import os, signal, time, torch

HERE = os.path.dirname(__file__)

def at(moment):
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        open(os.path.join(HERE, "at_" + moment), "w").close()

class Net(torch.nn.Linear):
    def __init__(self, ignores):
        super().__init__(4, 1)
        self.ignores, self.passes = ignores, 0

    def forward(self, x, y):
        if self.ignores:
            signal.signal(signal.SIGTERM, lambda *_: None)
        if not self.training:
            at("evaluation")
        else:
            self.passes += 1
            at("step") if self.passes > 4 and self.passes % 3 == 1 else None
            at("accumulation") if self.passes > 4 and self.passes % 3 == 2 else None
        time.sleep(0.1)
        return ((super().forward(x) - y) ** 2).mean()


def model(ignores=False):
    at("build")
    return Net(ignores)

def data(reading=0.0):
    at("tokenizing")
    time.sleep(reading)
    return [{"x": torch.ones(4) * i / 64, "y": torch.ones(1)} for i in range(64)]
"""
RECIPE = """
name: stop
model: {{task: custom, factory: "stop_model:model", arguments: {{ignores: {ignores}}}}}
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
EARLY = ("import", "tokenizing", "export")
MOMENTS = (*EARLY, "step", "accumulation", "save", "evaluation")
STATES = ("ranks ignore TERM", "rank stopped", "guardian stopped")  # in a step
TARGETS = ("command", "launcher", "guardian", "rank")
GONE_SECONDS = 10.0
HEAD = "| launcher | signal | to | during | status | ended (s) | COMPLETE (s) | all gone (s) | steps | saved | lost | |"


class Case(NamedTuple):
    """One run to end."""

    launcher: str
    signal: str
    target: str
    moment: str

    @property
    def exists(self) -> bool:
        """Whether it makes sense: `stop` has no target, local no launcher, srun's ranks no command.

        srun handles TERM and INT itself, torchrun ignores USR1.
        """
        if self.target == "command" and self.launcher == "srun" and self.signal != "stop":
            return False
        if self.target == "launcher":
            own = {"srun": ("TERM", "INT"), "torchrun": ("USR1",), "local": ("TERM", "INT", "USR1")}
            if self.signal in own.get(self.launcher, ()):
                return False
        if self.signal == "KILL":
            special = self.moment in STATES and self.target in ("command", "launcher")
            return self.launcher in ("torchrun", "mpi") and (special or self.moment in MOMENTS)
        return self.moment in MOMENTS and (self.signal != "stop" or self.target == "command")

    @property
    def is_kill_in_a_step(self) -> bool:
        """Whether no other case stands for it."""
        return self.signal == "KILL" and self.moment in ("step", *STATES)

    @property
    def number(self) -> int:
        """Of its signal; what `ortlaunch stop` leaves wakes as SIGUSR1 does."""
        return int(getattr(signal, f"SIG{self.signal}", signal.SIGUSR1))

    @property
    def dies(self) -> bool:
        """Whether nothing is saved: SIGKILL, or mpirun itself is told to end, which kills its ranks."""
        to_mpirun = self.launcher == "mpi" and self.target == "launcher" and self.signal in ("TERM", "INT")
        return to_mpirun or self.signal == "KILL"

    @property
    def expected(self) -> tuple[int, ...]:
        """The exit statuses that are right."""
        if self.signal == "KILL":
            return (-9,) if self.target == "command" else (137,)
        if self.dies:
            return (143, 85, 130)  # mpirun sends its ranks SIGTERM for both; they may end by themselves in time
        return (130,) if self.signal == "INT" else (85,)


class Places:
    """Where runs are started: here, or for srun in a lab that is made when it is first needed."""

    def __init__(self, stack: contextlib.ExitStack, launchers: Iterable[str]) -> None:
        self.lab: Any = None
        if "srun" in launchers:
            sys.path.insert(0, str(ROOT))
            from tests.cluster.lab import Lab

            self.lab = stack.enter_context(Lab(hosts=2))

    def start(self, folder: Path, case: Case) -> Victim:
        """The case's run."""
        (folder / "stop_model.py").write_text(MODULE)
        values = {
            "ignores": str(case.moment == STATES[0]).lower(),
            "reading": 30 if case.moment == "tokenizing" else 0,
            "engine": "ort" if case.moment == "export" else "eager",
            "evaluate": 3 if case.moment == "evaluation" else 100000,
            "every": 2 if case.moment == "save" else 100000,
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(RECIPE.format(**values))
        if case.launcher == "srun":
            before = self.lab.command("login", ["env", "--chdir", str(folder), "srun", "--nodes=2", "--ntasks=2"])
            return Victim(folder, (), self.lab.environ, before)
        ranks = "1" if case.launcher == "local" else "2"
        return Victim(folder, ("--nproc-per-node", ranks, "--launcher", case.launcher), dict(os.environ))


def is_at(run: Victim, case: Case) -> bool:
    """Whether it is at the case's moment now."""
    if case.moment == "import":
        return len(run.ranks()) >= (1 if case.launcher == "local" else 2)
    if case.moment == "save":
        return any((run.run / "checkpoints").glob("*.partial"))
    moment = {"export": "build"}.get(case.moment, "step" if case.moment in STATES else case.moment)
    return (run.folder / f"at_{moment}").exists()


def send(run: Victim, case: Case) -> None:
    """The signal, or the words of the verb."""
    if case.signal == "stop":
        subprocess.run([*TRAIN[:3], "stop", "--no-wait", str(run.run)], check=True, capture_output=True)
        return
    target = run.who(case.target)
    if case.moment.endswith(" stopped"):
        os.kill(run.who(case.moment.partition(" ")[0]), signal.SIGSTOP)
    os.kill(target, case.number)


def play(places: Places, case: Case) -> tuple[bool, str]:
    """One case: whether it is right, and its line."""
    with tempfile.TemporaryDirectory(prefix="stop_") as name:
        run = places.start(Path(name), case)
        try:
            wait(
                lambda: is_at(run, case) or run.command.poll() is not None,
                240,
                0.005 if case.moment == "save" else 0.02,
            )
            if run.command.poll() is not None or not is_at(run, case):
                return False, f"| {' | '.join(case)} | never came to that moment: {run.said()} |"
            time.sleep(0.3 if case.moment in ("import", "export") else 0)
            return judge(run, case)
        finally:
            run.end()


def judge(run: Victim, case: Case) -> tuple[bool, str]:
    """Send it, and look at what becomes of the run."""
    before, sent = run.steps(), time.time()
    send(run, case)
    try:
        status = run.command.wait(100)
    except subprocess.TimeoutExpired:
        return False, f"| {' | '.join(case)} | did not end in 100 s |"
    took, (step, complete) = time.time() - sent, run.saved()
    gone = wait(lambda: not processes(run.folder), 70, 0.1)
    gone_after = time.time() - sent
    lost, saves = max(0, before - step), case.moment not in EARLY
    in_time = gone and gone_after < (GONE_SECONDS if case.signal == "KILL" else took + 5)
    right = status in case.expected and in_time and (case.dies or (lost == 0 and (step > 0 or not saves)))
    when = f"{complete - sent:.2f}" if complete > sent else "-"
    left = f"{gone_after:.1f}" if gone else "never"
    cells = (status, f"{took:.2f}", when, left, before, step, lost, "" if right else f"WRONG: {run.said()}")
    return right, f"| {' | '.join(case)} | {' | '.join(map(str, cells))} |"


def covering(cases: list[Case], size: int) -> list[Case]:
    """As few as have each so many of their four words together that any has, and each SIGKILL in a step; greedy."""
    parts = {case: set(itertools.combinations(case, 4 if case.is_kill_in_a_step else size)) for case in cases}
    left: set[Any] = set().union(*parts.values())
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(parts[case] & left))
        chosen.append(best)
        left -= parts[best]
    return sorted(chosen, key=cases.index)


def cases_of(asked: argparse.Namespace) -> Iterator[Case]:
    """All that make sense."""
    for parts in itertools.product(asked.launchers, asked.signals, asked.targets, asked.moments):
        if Case(*parts).exists:
            yield Case(*parts)


def main() -> None:
    """Play the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--launchers", type=words, default=["local", "torchrun", "mpi"])
    parser.add_argument("--signals", type=words, default=["TERM", "INT", "USR1", "stop", "KILL"])
    parser.add_argument("--targets", type=words, default=list(TARGETS))
    parser.add_argument("--moments", type=words, default=[*MOMENTS, *STATES])
    parser.add_argument("--each", type=int, default=4, help="so many of the four words together once; 4: all cases")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    asked = parser.parse_args()
    cases = covering(list(cases_of(asked)), asked.each)
    print(HEAD, "|---" * 12 + "|", sep="\n", flush=True)
    good = []
    with contextlib.ExitStack() as stack:
        places = Places(stack, asked.launchers)
        pool = stack.enter_context(ThreadPoolExecutor(asked.jobs))
        for right, line in pool.map(lambda case: play(places, case), cases):
            good.append(right)
            print(line, flush=True)
    print(f"\n{sum(good)} of {len(good)} as docs/ends.md says")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()

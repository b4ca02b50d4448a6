"""Runs that are ended by every signal, at every moment, under every launcher, as in docs/concepts/ends.md.

A case is one run: the signal is sent to its target at its moment, then the run's end is checked.
Lost steps are those that were done before the signal and are not in the newest checkpoint. KILL is
also sent to the command or launcher of ranks that ignore SIGTERM, of a stopped rank, or of a rank
whose supervisor is stopped. srun's runs need a lab.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import labs
from tests.cluster.lab import Lab, lacking
from tests.e2e.victim import TRAIN, Victim, processes, wait

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
# At these moments no step is done, so there is nothing to save.
EARLY = ("import", "tokenizing", "export")
MOMENTS = (*EARLY, "step", "accumulation", "save", "evaluation")
# These moments are states of the ranks during a step.
STATES = ("ranks ignore TERM", "rank stopped", "supervisor stopped")
TARGETS = ("command", "launcher", "supervisor", "rank")
# Limit in seconds from SIGKILL until no process of the run is left.
GONE_SECONDS = 10.0
LAUNCHERS = ("local", "torchrun", "mpi", "srun")
# `stop` is the command `ortlaunch stop`; all others are signals.
SIGNALS = ("TERM", "INT", "USR1", "stop", "KILL")


class Case(NamedTuple):
    """A launcher, a signal, its target and its moment."""

    launcher: str
    signal: str
    target: str
    moment: str

    @property
    def exists(self) -> bool:
        """Whether the case is possible.

        `stop` has no target, a local run has no launcher, and srun's ranks have no command. srun
        handles TERM and INT itself, and torchrun ignores USR1.
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
        """Whether no other case can represent this one."""
        return self.signal == "KILL" and self.moment in ("step", *STATES)

    @property
    def number(self) -> int:
        """The number of the case's signal; `ortlaunch stop` has the effect of SIGUSR1."""
        return int(getattr(signal, f"SIG{self.signal}", signal.SIGUSR1))

    @property
    def dies(self) -> bool:
        """Whether nothing is saved: SIGKILL, or TERM or INT to mpirun, which kills its ranks."""
        to_mpirun = (
            self.launcher == "mpi" and self.target == "launcher" and self.signal in ("TERM", "INT")
        )
        return to_mpirun or self.signal == "KILL"

    @property
    def expected(self) -> tuple[int, ...]:
        """The exit statuses that are accepted."""
        if self.signal == "KILL":
            # 137 is 128 + SIGKILL; -9 is Popen's status for a killed command.
            return (-9,) if self.target == "command" else (137,)
        if self.dies:
            # mpirun sends SIGTERM to its ranks for both signals, and they may end before it.
            return (143, 85, 130)
        return (130,) if self.signal == "INT" else (85,)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab of two hosts for srun's runs."""
    if lack := lacking():
        labs.skip(lack)
    with Lab(hosts=2) as running:
        yield running


def start(folder: Path, case: Case, lab: Lab | None) -> Victim:
    """Start the run of a case."""
    (folder / "stop_model.py").write_text(MODULE)
    # Values that make the wanted moment long or frequent, and the others rare.
    values = {
        "ignores": str(case.moment == STATES[0]).lower(),
        "reading": 30 if case.moment == "tokenizing" else 0,
        "engine": "ort" if case.moment == "export" else "eager",
        "evaluate": 3 if case.moment == "evaluation" else 100000,
        "every": 2 if case.moment == "save" else 100000,
    }
    (folder / "recipe.yaml").write_text(RECIPE.format(**values))
    if lab is not None:
        before = lab.command(
            "login", ["env", "--chdir", str(folder), "srun", "--nodes=2", "--ntasks=2"]
        )
        return Victim(folder, (), lab.environ, before)
    ranks = "1" if case.launcher == "local" else "2"
    return Victim(
        folder, ("--nproc-per-node", ranks, "--launcher", case.launcher), dict(os.environ)
    )


def is_at(run: Victim, case: Case) -> bool:
    """Return whether the run is at the case's moment."""
    # Processes exist before their libraries are loaded.
    if case.moment == "import":
        return len(run.ranks()) >= (1 if case.launcher == "local" else 2)
    if case.moment == "save":
        return any((run.run / "checkpoints").glob("*.partial"))
    # The export follows the model's construction; the caller waits a little more.
    moment = {"export": "build"}.get(case.moment, "step" if case.moment in STATES else case.moment)
    return (run.folder / f"at_{moment}").exists()


def send(run: Victim, case: Case) -> None:
    """Send the case's signal, or run `ortlaunch stop`."""
    if case.signal == "stop":
        subprocess.run(
            [*TRAIN[:3], "stop", "--no-wait", str(run.run)], check=True, capture_output=True
        )
        return
    target = run.who(case.target)
    if case.moment.endswith(" stopped"):
        os.kill(run.who(case.moment.partition(" ")[0]), signal.SIGSTOP)
    os.kill(target, case.number)


def covering(size: int) -> list[Case]:
    """Return a small set of cases that covers every possible combination of `size` parts.

    Every SIGKILL in a step is included. The selection is greedy.
    """
    every = itertools.product(LAUNCHERS, SIGNALS, TARGETS, (*MOMENTS, *STATES))
    cases = [case for case in itertools.starmap(Case, every) if case.exists]
    parts = {
        case: set(itertools.combinations(case, 4 if case.is_kill_in_a_step else size))
        for case in cases
    }
    left: set[Any] = set().union(*parts.values())
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(parts[case] & left))
        chosen.append(best)
        left -= parts[best]
    return sorted(chosen, key=cases.index)


def parameters() -> list[Any]:
    """Return cases that cover each triple of launcher, signal, target and moment."""
    return [
        pytest.param(
            case, id="-".join(case), marks=[pytest.mark.lab] if case.launcher == "srun" else []
        )
        for case in covering(3)
    ]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", parameters())
def test_a_signal(
    case: Case,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """A signalled run has the right status and checkpoint, and leaves no process."""
    lab = request.getfixturevalue("lab") if case.launcher == "srun" else None
    run = start(tmp_path, case, lab)
    try:
        # A checkpoint's partial folder exists only for milliseconds.
        often = 0.005 if case.moment == "save" else 0.02
        wait(lambda: is_at(run, case) or run.command.poll() is not None, 240, often)
        assert run.command.poll() is None, f"never came to that moment: {run.said()}"
        assert is_at(run, case), f"never came to that moment: {run.said()}"
        # A process that starts to import, or to export, needs a moment to be in the middle of it.
        time.sleep(0.3 if case.moment in ("import", "export") else 0)
        judge(run, case, record_property)
    finally:
        run.end()


def judge(run: Victim, case: Case, record: Callable[[str, object], None]) -> None:
    """Send the signal, and inspect the end of the run."""
    # Steps are read before the signal: steps after it need not be saved.
    before = run.steps()
    sent = time.time()
    send(run, case)
    status = run.command.wait(100)
    took, (step, complete) = time.time() - sent, run.saved()
    gone = wait(lambda: not processes(run.folder), 70, 0.1)
    gone_after = time.time() - sent
    lost = max(0, before - step)
    figures = {
        "status": status, "ended after, s": round(took, 2),
        "COMPLETE after, s": round(complete - sent, 2) if complete > sent else None,
        "all gone after, s": round(gone_after, 1), "steps": before, "saved": step, "lost": lost,
    }  # fmt: skip
    for name, value in figures.items():
        record(name, value)
    assert status in case.expected, run.said()
    assert gone
    assert gone_after < (GONE_SECONDS if case.signal == "KILL" else took + 5)
    if not case.dies:
        assert lost == 0
        assert step > 0 or case.moment in EARLY

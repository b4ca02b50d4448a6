"""`ortlaunch selftest`: one tiny recipe under each backend that this place has; ranks and losses must be the same.

Each is the command that a user would type, in a folder of its own beside the others; ranks say who they are.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch import start
from ortlaunch.errors import InputError, MissingDependency
from ortlaunch.launch.mpi import find_mpirun
from ortlaunch.plan import Plan
from ortlaunch.planning.hosts import Host, read_hostfile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import json_lines

_TOLERANCE = 1e-5
_MODULE = '''\
"""A linear model; each rank leaves who it is in its run folder."""
import json, os, pathlib, sys
import torch

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        folder = pathlib.Path(sys.argv[-1]) / "ranks"
        folder.mkdir(exist_ok=True)
        (folder / os.environ["RANK"]).write_text(json.dumps([int(os.environ[name]) for name in NAMES]))

    def forward(self, x, y):
        return ((self.linear(x) - y) ** 2).mean()

def data():
    generator = torch.Generator().manual_seed(0)
    return [{"x": row, "y": row.sum().reshape(1)} for row in torch.randn(256, 4, generator=generator)]
'''
_RECIPE = """\
name: selftest
model: {task: custom, factory: "selftest_model:Model"}
data: {train: {format: custom, factory: "selftest_model:data"}}
batch: {global_size: %d, micro_size: 1}
optimizer: {name: adamw, learning_rate: 0.1}
engine: {name: eager}
train: {max_steps: 4}
log: {every_steps: 1}
launch: {device: cpu}
"""


class Trial(NamedTuple):
    """One backend, and the words that start the recipe under it."""

    name: str
    words: tuple[str, ...]
    verb: str = "train"


class Outcome(NamedTuple):
    """What it came to."""

    name: str
    where: str
    losses: tuple[float, ...]
    seconds: float
    wrong: str = ""

    def line(self, expected: Sequence[float]) -> str:
        """For a person, beside the first one's losses."""
        ends = f"{self.losses[0]:.6f} -> {self.losses[-1]:.6f}" if self.losses else "none"
        return f"  {self.name:<18} {self.where:<34} {ends:<24} {self.seconds:6.1f} s  {self.verdict(expected)}"

    def verdict(self, expected: Sequence[float]) -> str:
        """`equal`, or what is wrong."""
        if self.wrong:
            return self.wrong
        if len(self.losses) != len(expected):
            return f"{len(self.losses)} STEPS, not {len(expected)}"
        far = max((abs(mine - other) for mine, other in zip(self.losses, expected)), default=math.inf)
        return "equal" if far <= _TOLERANCE else f"LOSSES DIFFER by {far:.2g}"


def selftest(folder: Path, hostfile: str | None, overrides: Sequence[str], slurm: bool = False) -> bool:
    """Run all, print the table; whether all are equal. With `slurm` a job is queued, too.

    Ended by a signal, it ends what it has started and cancels the job.

    Raises:
        InputError: the folder is there and not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    hosts = read_hostfile(hostfile, 1).hosts if hostfile else ()
    (folder / "selftest_model.py").write_text(_MODULE, encoding="utf-8")
    (folder / "recipe.yaml").write_text(_RECIPE % _global_size(hosts), encoding="utf-8")
    print(f"  {'backend':<18} {'ranks':<34} {'losses':<24} {'time':>8}", flush=True)
    outcomes: list[Outcome] = []
    for trial in _trials(hostfile, hosts):
        if trial.verb == "submit" and not slurm:
            print(f"  {trial.name:<18} not tested: it queues a job, with --slurm", flush=True)
            continue
        outcomes.append(_run(folder, trial, overrides))
        print(outcomes[-1].line(outcomes[0].losses), flush=True)
    bad = sum(one.verdict(outcomes[0].losses) != "equal" for one in outcomes)
    print(
        f"{bad} of {len(outcomes)} backends differ or failed; see {folder}"
        if bad
        else f"{len(outcomes)} backends: equal"
    )
    return not bad


def _global_size(hosts: Sequence[Host]) -> int:
    return math.lcm(4, sum(host.slots for host in hosts) or 1)


def _trials(hostfile: str | None, hosts: Sequence[Host]) -> Iterator[Trial]:
    """What this place has."""
    two = ("--nproc-per-node", "2")
    yield Trial("local", ("--launcher", "local"))
    yield Trial("torchrun", ("--launcher", "torchrun", *two))
    has_mpi = _has_mpirun()
    if has_mpi:
        yield Trial("mpi", ("--launcher", "mpi", *two))
    if hostfile and len({host.slots for host in hosts}) == 1:  # torchrun takes no others
        yield Trial("torchrun, hosts", ("--launcher", "torchrun", "--hostfile", hostfile))
    if hostfile and has_mpi:
        yield Trial("mpi, hosts", ("--launcher", "mpi", "--hostfile", hostfile))
    if there := _slurm_nodes():
        nodes = min(there, 2)
        yield Trial("slurm", (f"launch.nodes={nodes}", f"launch.processes_per_node={2 // nodes}"), "submit")


def _has_mpirun() -> bool:
    try:
        find_mpirun()
    except MissingDependency:
        return False
    return True


def _slurm_nodes() -> int:
    """How many this host's Slurm has; 0: it has none that answers."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return 0
    ended = subprocess.run(["sinfo", "--noheader", "-o", "%n"], capture_output=True, text=True, timeout=60, check=False)
    return len(set(ended.stdout.split()))


def _run(folder: Path, trial: Trial, overrides: Sequence[str]) -> Outcome:
    """Train under one backend, to the end."""
    run, began = RunDir(folder / trial.name.replace(", ", "-")), time.monotonic()
    command = start.command("ortlaunch.cli")
    words = (trial.verb, str(folder / "recipe.yaml"), *trial.words, *overrides, "--run-dir", str(run))
    status = _call((*command, *words), folder / f"{run.path.name}.log")
    if trial.verb == "submit" and not status:
        try:
            status = _call((*command, "status", str(run), "--wait"), folder / f"{run.path.name}.log")
        except BaseException:  # a signal
            _call((*command, "cancel", str(run)), folder / f"{run.path.name}.log")
            raise
    seconds = time.monotonic() - began
    if status:
        return Outcome(trial.name, "", (), seconds, f"FAILED with status {status}: {folder / run.path.name}.log")
    plan = Plan.read(run.plan)
    return Outcome(trial.name, _where(plan), _losses(run), seconds, _misplaced(run, plan))


def _call(argv: Sequence[str], log: Path) -> int:
    with log.open("ab") as file, subprocess.Popen(argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        except BaseException:  # a signal: what was started ends first
            child.terminate()
            raise


def _where(plan: Plan) -> str:
    return " ".join(f"{node.host}:{node.first_rank}-{node.first_rank + node.slots - 1}" for node in plan.nodes)


def _losses(run: RunDir) -> tuple[float, ...]:
    records = json_lines(run.metrics).found
    return tuple(record["loss"] for record in records if "loss" in record)


def _misplaced(run: RunDir, plan: Plan) -> str:
    """Ranks that were not where the plan has them."""
    told = {path.name: json.loads(path.read_text()) for path in (run.path / "ranks").glob("[0-9]*")}
    wrong = [rank.rank for rank in plan.ranks if told.get(str(rank.rank)) != list(rank)]
    return f"RANKS DIFFER from the plan: {', '.join(map(str, wrong))}" if wrong else ""

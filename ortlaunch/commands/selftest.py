"""`ortlaunch selftest`: check and measure the hosts, and train a tiny recipe with each launcher.

Each training is the command that a user would type, in a folder of its own. The ranks write their
rank variables, which are compared with the plan. All results are findings, as those of
`ortlaunch doctor`.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch import start
from ortlaunch.doctor import fabric
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding
from ortlaunch.errors import InputError, MissingDependency, PlanError
from ortlaunch.launch import load_backend
from ortlaunch.launch.failure import classify_run_end
from ortlaunch.launch.mpi import find_mpirun
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.hosts import Host, read_hostfile, select
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.prepare import write_run
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run.checkup import CheckupOptions, add_slurm_job_hosts, check_hosts_or_this_machine
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.lines import read_json_lines

# Largest difference of losses: ranks add the same samples in another order.
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
# The measurement is for the device that a training would use, with any number of ranks.
_MEASURED = ("launch.device=auto", "batch={micro_size: 1, accumulation_steps: 1}")


class SelftestRequest(NamedTuple):
    """The folder, the launchers and the changes of the tiny recipe."""

    folder: Path
    """A new folder for all runs, shared by all hosts."""
    overrides: tuple[str, ...] = ()
    """Overrides of the tiny recipe."""
    launch: LaunchOptions = LaunchOptions()
    """Options of the launch; if they name a launcher, it alone is tested, on this host."""
    port: int = 0
    ports: tuple[int, int] | None = None


class Training(NamedTuple):
    """One launcher or scheduler, and the arguments that start the recipe with it."""

    name: str
    words: tuple[str, ...]
    verb: str = "train"


class Trained(NamedTuple):
    """The result of one training."""

    name: str
    where: str
    losses: tuple[float, ...]
    seconds: float
    log: Path
    wrong: str = ""

    def finding(self, expected: Sequence[float]) -> Finding:
        """Return the finding, compared with the losses of the first training."""
        ends = f", losses {self.losses[0]:.6f} -> {self.losses[-1]:.6f}" if self.losses else ""
        wrong = self.wrong or self._difference(expected)
        what = f"{wrong or 'equal'}: {self.where}{ends}, {self.seconds:.1f} s"
        check = f"train {self.name}"
        return (
            Finding("all", check, FAILED, what, f"see {self.log}")
            if wrong
            else Finding("all", check, OK, what)
        )

    def _difference(self, expected: Sequence[float]) -> str:
        if len(self.losses) != len(expected):
            return f"{len(self.losses)} STEPS, not {len(expected)}"
        far = max(
            (abs(mine - other) for mine, other in zip(self.losses, expected)), default=math.inf
        )
        return "" if far <= _TOLERANCE else f"LOSSES DIFFER by {far:.2g}"


def selftest(
    request: SelftestRequest, may_queue: Callable[[str], bool], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield every finding as soon as it is known; start no rank if a check of the hosts failed.

    After a signal it ends all that it has started and cancels the job.

    Args:
        may_queue: function that returns whether a job may be queued; it is called with the
            question, before anything is started.

    Raises:
        InputError: the folder exists and is not empty.
    """
    folder = request.folder
    options = request.launch
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder with --dir")
    hosts = _hosts(options)
    # Two nodes are enough to test a job across hosts.
    nodes = min(_slurm_nodes(), 2)
    queues = nodes > 0 and may_queue(f"Also queue a job of {nodes} nodes in Slurm?")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "selftest_model.py").write_text(_MODULE, encoding="utf-8")
    (folder / "recipe.yaml").write_text(_RECIPE % _global_size(hosts, options), encoding="utf-8")
    place = CheckupOptions(folder, port=request.port, port_range=request.ports)
    measured = (*_MEASURED, *request.overrides)
    checked = check_hosts_or_this_machine(folder / "recipe.yaml", measured, options, place, environ)
    yield from checked
    if any(finding.verdict == FAILED for finding in checked):
        yield Finding(
            "all", "ranks", WARNING, "not started, because a check failed", "mend that first"
        )
        return
    yield from _measure(folder, measured, options, environ)
    expected: tuple[float, ...] | None = None
    for training in _trainings(options, hosts, nodes):
        if training.verb == "submit" and not queues:
            what = "not tested: this would queue a job"
            mend = "answer yes, or give --yes"
            yield Finding("all", f"train {training.name}", WARNING, what, mend)
            continue
        trained = _train(folder, training, request.overrides)
        # The first training has one rank, so that its losses are those without any launcher.
        expected = trained.losses if expected is None else expected
        yield trained.finding(expected)


def _measure(
    folder: Path, overrides: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> Sequence[Finding]:
    """Start ranks as for a training, and return findings on their measured rates and links."""
    options = add_slurm_job_hosts(options, environ)._replace(task="fabric")
    resolved = resolve(folder / "recipe.yaml", tuple(overrides), options, environ)
    if resolved.world.inside is not None:
        raise PlanError(
            "selftest starts its own ranks, and this process is already a rank of a launcher"
        )
    run = RunDir(folder / "fabric")
    plan = resolved.plan
    request = write_run(run, resolved.file.recipe, plan)
    launcher = load_backend(plan.launcher)
    log = run.path / "output.txt"
    # The ranks are a part of this command: SIGUSR1, too, has to end them.
    job = launcher.submit(request._replace(notice_ends=True), log)
    end = classify_run_end(
        run, launcher.wait(job), job.user_signal, job.foreign_signal, job.oom_kills
    )
    if job.user_signal is not None:
        sys.exit(128 + job.user_signal)
    if end.status or not run.fabric.exists():
        return [
            Finding("all", "ranks", FAILED, f"the measurement failed: {end.text}", f"see {log}")
        ]
    return fabric.judge(read_own_json(run.fabric), plan.nodes)


def _hosts(options: LaunchOptions) -> Sequence[Host]:
    """Return the hosts of the host file that the options include."""
    if options.hostfile is None:
        return ()
    return select(read_hostfile(options.hostfile, 1).hosts, options.include, options.exclude)


def _global_size(hosts: Sequence[Host], options: LaunchOptions) -> int:
    # Divisible by 1, 2 and 4 ranks, by all slots of the hosts, and by the requested ranks.
    ranks = options.processes_per_node or 1
    return math.lcm(4, sum(host.slots for host in hosts) or 1, ranks * (len(hosts) or 1))


def _trainings(options: LaunchOptions, hosts: Sequence[Host], nodes: int) -> Iterator[Training]:
    """Yield the trainings that are possible here; all losses are compared with the first one's."""
    launchers = (
        [options.launcher] if options.launcher in ("torchrun", "mpi") else ["torchrun", "mpi"]
    )
    if "mpi" in launchers and not _has_mpirun():
        launchers.remove("mpi")
    yield Training("local", ("--launcher", "local"))
    ranks = str(options.processes_per_node or 2)
    for launcher in launchers:
        yield Training(launcher, ("--launcher", launcher, "--nproc-per-node", ranks))
    chosen = (
        ("--hostfile", options.hostfile),
        ("--include", options.include),
        ("--exclude", options.exclude),
    )
    words = [word for name, value in chosen if value for word in (name, value)]
    for launcher in launchers if hosts else ():
        # torchrun needs the same number of ranks on each host.
        if launcher == "mpi" or len({host.slots for host in hosts}) == 1:
            yield Training(f"{launcher}, hosts", ("--launcher", launcher, *words))
    if nodes:
        yield Training(
            "slurm", (f"launch.nodes={nodes}", f"launch.processes_per_node={2 // nodes}"), "submit"
        )


def _has_mpirun() -> bool:
    try:
        find_mpirun()
    except MissingDependency:
        return False
    return True


def _slurm_nodes() -> int:
    """Return the number of nodes of this host's Slurm; 0 if none answers."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return 0
    ended = subprocess.run(
        ["sinfo", "--noheader", "-o", "%n"], capture_output=True, text=True, timeout=60, check=False
    )
    return len(set(ended.stdout.split()))


def _train(folder: Path, training: Training, overrides: Sequence[str]) -> Trained:
    """Train with one launcher or scheduler until the end."""
    run = RunDir(folder / training.name.replace(", ", "-"))
    began = time.monotonic()
    log = folder / f"{run.path.name}.log"
    command = start.module_command("ortlaunch.cli")
    words = (
        training.verb,
        str(folder / "recipe.yaml"),
        *training.words,
        *overrides,
        "--run-dir",
        str(run),
    )
    status = _call((*command, *words), log)
    # `submit` returns when the job is queued, the other verbs when the training has ended.
    if training.verb == "submit" and not status:
        try:
            status = _call((*command, "status", str(run), "--wait"), log)
        # Also after a signal: the job would stay in the queue.
        except BaseException:
            _call((*command, "cancel", str(run)), log)
            raise
    seconds = time.monotonic() - began
    if status:
        return Trained(training.name, f"status {status}", (), seconds, log, "FAILED")
    plan = Plan.read(run.plan)
    return Trained(training.name, _where(plan), _losses(run), seconds, log, _misplaced(run, plan))


def _call(argv: Sequence[str], log: Path) -> int:
    # Without stdin, so that no command can wait for an answer.
    with (
        log.open("ab") as file,
        subprocess.Popen(argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL) as child,
    ):
        try:
            return child.wait()
        # Also after a signal: the child process ends first.
        except BaseException:
            child.terminate()
            raise


def _where(plan: Plan) -> str:
    return " ".join(
        f"{node.host}:{node.first_rank}-{node.first_rank + node.slots - 1}" for node in plan.nodes
    )


def _losses(run: RunDir) -> tuple[float, ...]:
    records = read_json_lines(run.metrics).values
    return tuple(record["loss"] for record in records if "loss" in record)


def _misplaced(run: RunDir, plan: Plan) -> str:
    """Return a text on the ranks whose variables differ from the plan; empty if there is none."""
    actual = {
        path.name: json.loads(path.read_text()) for path in (run.path / "ranks").glob("[0-9]*")
    }
    wrong = [rank.rank for rank in plan.ranks if actual.get(str(rank.rank)) != list(rank)]
    return f"RANKS DIFFER from the plan ({', '.join(map(str, wrong))})" if wrong else ""

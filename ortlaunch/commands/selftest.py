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

from ortlaunch.base import module_start
from ortlaunch.base.errors import InputError, MissingDependency, PlanError
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.doctor import fabric
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding
from ortlaunch.launch import load_backend
from ortlaunch.launch.mpi import require_mpirun_here_or_on_path
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.hosts import Host, filter_hosts_by_include_or_exclude, read_hostfile
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from ortlaunch.run.checkup import (
    CheckupOptions,
    check_hosts_or_this_machine,
    options_with_slurm_hosts_unless_given,
)
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.lines import read_json_lines_with_keys

# Largest difference of losses: ranks add the same samples in another order.
_TOLERANCE = 1e-5
_MODULE_SOURCE = '''\
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
_RECIPE_TEXT = """\
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
_MEASURED_OVERRIDES = ("launch.device=auto", "batch={micro_size: 1, accumulation_steps: 1}")


class SelftestRequest(NamedTuple):
    """The folder, the launchers and the changes of the tiny recipe."""

    folder: Path
    """A new folder for all runs, shared by all hosts."""
    overrides: tuple[str, ...] = ()
    """Overrides of the tiny recipe."""
    launch_options: LaunchOptions = LaunchOptions()
    """Options of the launch; if they name a launcher, it alone is tested, on this host."""
    port: int = 0
    port_range: tuple[int, int] | None = None


class Training(NamedTuple):
    """One launcher or scheduler, and the arguments that start the recipe with it."""

    name: str
    arguments: tuple[str, ...]
    verb: str = "train"


class TrainingResult(NamedTuple):
    """The result of one training."""

    name: str
    ranks_text: str
    losses: tuple[float, ...]
    seconds: float
    log: Path
    failure_text: str = ""

    def finding_compared_with_first_losses(self, expected_losses: Sequence[float]) -> Finding:
        """Return the finding, compared with the losses of the first training."""
        losses_text = (
            f", losses {self.losses[0]:.6f} -> {self.losses[-1]:.6f}" if self.losses else ""
        )
        failure_text = self.failure_text or self._loss_difference_text_or_empty(expected_losses)
        observation = (
            f"{failure_text or 'equal'}: {self.ranks_text}{losses_text}, {self.seconds:.1f} s"
        )
        check_name = f"train {self.name}"
        return (
            Finding("all", check_name, FAILED, observation, f"see {self.log}")
            if failure_text
            else Finding("all", check_name, OK, observation)
        )

    def _loss_difference_text_or_empty(self, expected_losses: Sequence[float]) -> str:
        if len(self.losses) != len(expected_losses):
            return f"{len(self.losses)} STEPS, not {len(expected_losses)}"
        largest_distance = max(
            (
                abs(own_loss - expected_loss)
                for own_loss, expected_loss in zip(self.losses, expected_losses)
            ),
            default=math.inf,
        )
        return "" if largest_distance <= _TOLERANCE else f"LOSSES DIFFER by {largest_distance:.2g}"


def check_hosts_and_train_with_each_launcher(
    selftest_request: SelftestRequest, may_queue: Callable[[str], bool], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield every finding as soon as it is known; start no rank if a check of the hosts failed.

    After a signal it ends all that it has started and cancels the job.

    Args:
        may_queue: function that returns whether a job may be queued; it is called with the
            question, before anything is started.

    Raises:
        InputError: the folder exists and is not empty.
    """
    folder = selftest_request.folder
    options = selftest_request.launch_options
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder with --dir")
    hosts = _included_hostfile_hosts_or_empty(options)
    # Two nodes are enough to test a job across hosts.
    node_count = min(_slurm_node_count_or_zero(), 2)
    queues_job = node_count > 0 and may_queue(f"Also queue a job of {node_count} nodes in Slurm?")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "selftest_model.py").write_text(_MODULE_SOURCE, encoding="utf-8")
    (folder / "recipe.yaml").write_text(
        _RECIPE_TEXT % _global_batch_size(hosts, options), encoding="utf-8"
    )
    checkup_options = CheckupOptions(
        folder, port=selftest_request.port, port_range=selftest_request.port_range
    )
    measured_overrides = (*_MEASURED_OVERRIDES, *selftest_request.overrides)
    host_findings = check_hosts_or_this_machine(
        folder / "recipe.yaml", measured_overrides, options, checkup_options, environ
    )
    yield from host_findings
    if any(finding.verdict == FAILED for finding in host_findings):
        yield Finding(
            "all", "ranks", WARNING, "not started, because a check failed", "mend that first"
        )
        return
    yield from _measure_fabric_by_ranks_and_return_findings(
        folder, measured_overrides, options, environ
    )
    expected_losses: tuple[float, ...] | None = None
    for training in _trainings_possible_on_hosts(options, hosts, node_count):
        if training.verb == "submit" and not queues_job:
            observation = "not tested: this would queue a job"
            remedy = "answer yes, or give --yes"
            yield Finding("all", f"train {training.name}", WARNING, observation, remedy)
            continue
        training_result = _train_or_submit_and_summarize_result(
            folder, training, selftest_request.overrides
        )
        # The first training has one rank, so that its losses are those without any launcher.
        expected_losses = training_result.losses if expected_losses is None else expected_losses
        yield training_result.finding_compared_with_first_losses(expected_losses)


def _measure_fabric_by_ranks_and_return_findings(
    selftest_folder: Path,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
    environ: Mapping[str, str],
) -> Sequence[Finding]:
    """Start ranks as for a training, and return findings on their measured rates and links."""
    launch_options = options_with_slurm_hosts_unless_given(launch_options, environ)._replace(
        task="fabric"
    )
    resolved = load_and_resolve_recipe(
        selftest_folder / "recipe.yaml", tuple(overrides), launch_options, environ
    )
    if resolved.world.enclosing_rank is not None:
        raise PlanError(
            "selftest starts its own ranks, and this process is already a rank of a launcher"
        )
    run = RunDir(selftest_folder / "fabric")
    plan = resolved.plan
    request = write_run_files_and_clear_earlier_start(run, resolved.recipe_file.recipe, plan)
    launcher = load_backend(plan.launcher)
    output_path = run.path / "output.txt"
    # The ranks are a part of this command: SIGUSR1, too, has to end them.
    job = launcher.write_files_and_start_job(request._replace(notice_ends=True), output_path)
    verdict = conclude_run(
        run,
        launcher.forward_signals_until_job_ends(job),
        job.user_signal,
        job.foreign_signal,
        job.oom_kills,
    )
    if job.user_signal is not None:
        sys.exit(128 + job.user_signal)
    if verdict.exit_status or not run.fabric.exists():
        return [
            Finding(
                "all",
                "ranks",
                FAILED,
                f"the measurement failed: {verdict.render()}",
                f"see {output_path}",
            )
        ]
    return fabric.findings_on_matmul_links_and_all_reduce(
        read_json_or_raise_damaged(run.fabric), plan.nodes
    )


def _included_hostfile_hosts_or_empty(options: LaunchOptions) -> Sequence[Host]:
    """Return the hosts of the host file that the options include."""
    if options.hostfile is None:
        return ()
    return filter_hosts_by_include_or_exclude(
        read_hostfile(options.hostfile, 1).hosts, options.include, options.exclude
    )


def _global_batch_size(hosts: Sequence[Host], options: LaunchOptions) -> int:
    # Divisible by 1, 2 and 4 ranks, by all slots of the hosts, and by the requested ranks.
    ranks_per_host = options.processes_per_node or 1
    return math.lcm(4, sum(host.slots for host in hosts) or 1, ranks_per_host * (len(hosts) or 1))


def _trainings_possible_on_hosts(
    launch_options: LaunchOptions, hosts: Sequence[Host], slurm_node_count_or_zero: int
) -> Iterator[Training]:
    """Yield the trainings that are possible here; all losses are compared with the first one's."""
    launchers = (
        [launch_options.launcher]
        if launch_options.launcher in ("torchrun", "mpi")
        else ["torchrun", "mpi"]
    )
    if "mpi" in launchers and not _has_mpirun():
        launchers.remove("mpi")
    yield Training("local", ("--launcher", "local"))
    ranks_text = str(launch_options.processes_per_node or 2)
    for launcher in launchers:
        yield Training(launcher, ("--launcher", launcher, "--nproc-per-node", ranks_text))
    host_options = (
        ("--hostfile", launch_options.hostfile),
        ("--include", launch_options.include),
        ("--exclude", launch_options.exclude),
    )
    host_arguments = [word for name, value in host_options if value for word in (name, value)]
    for launcher in launchers if hosts else ():
        # torchrun needs the same number of ranks on each host.
        if launcher == "mpi" or len({host.slots for host in hosts}) == 1:
            yield Training(f"{launcher}, hosts", ("--launcher", launcher, *host_arguments))
    if slurm_node_count_or_zero:
        yield Training(
            "slurm",
            (
                f"launch.nodes={slurm_node_count_or_zero}",
                f"launch.processes_per_node={2 // slurm_node_count_or_zero}",
            ),
            "submit",
        )


def _has_mpirun() -> bool:
    try:
        require_mpirun_here_or_on_path()
    except MissingDependency:
        return False
    return True


def _slurm_node_count_or_zero() -> int:
    """Return the number of nodes of this host's Slurm; 0 if none answers."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return 0
    completed = subprocess.run(
        ["sinfo", "--noheader", "-o", "%n"], capture_output=True, text=True, timeout=60, check=False
    )
    return len(set(completed.stdout.split()))


def _train_or_submit_and_summarize_result(
    selftest_folder: Path, training: Training, overrides: Sequence[str]
) -> TrainingResult:
    """Train with one launcher or scheduler until the end."""
    run = RunDir(selftest_folder / training.name.replace(", ", "-"))
    start_time = time.monotonic()
    log_path = selftest_folder / f"{run.path.name}.log"
    cli_argv = module_start.module_command("ortlaunch.cli")
    arguments = (
        training.verb,
        str(selftest_folder / "recipe.yaml"),
        *training.arguments,
        *overrides,
        "--run-dir",
        str(run),
    )
    exit_status = _run_command_with_output_in_log((*cli_argv, *arguments), log_path)
    # `submit` returns when the job is queued, the other verbs when the training has ended.
    if training.verb == "submit" and not exit_status:
        try:
            exit_status = _run_command_with_output_in_log(
                (*cli_argv, "status", str(run), "--wait"), log_path
            )
        # Also after a signal: the job would stay in the queue.
        except BaseException:
            _run_command_with_output_in_log((*cli_argv, "cancel", str(run)), log_path)
            raise
    duration_seconds = time.monotonic() - start_time
    if exit_status:
        return TrainingResult(
            training.name, f"status {exit_status}", (), duration_seconds, log_path, "FAILED"
        )
    plan = Plan.read(run.plan)
    return TrainingResult(
        training.name,
        _ranks_by_host_text(plan),
        _logged_losses(run),
        duration_seconds,
        log_path,
        _misplaced_ranks_text_or_empty(run, plan),
    )


def _run_command_with_output_in_log(argv: Sequence[str], log_path: Path) -> int:
    # Without stdin, so that no command can wait for an answer.
    with (
        log_path.open("ab") as file,
        subprocess.Popen(argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL) as child_process,
    ):
        try:
            return child_process.wait()
        # Also after a signal: the child process ends first.
        except BaseException:
            child_process.terminate()
            raise


def _ranks_by_host_text(plan: Plan) -> str:
    return " ".join(
        f"{node.host}:{node.first_rank}-{node.first_rank + node.slots - 1}" for node in plan.nodes
    )


def _logged_losses(run: RunDir) -> tuple[float, ...]:
    records = read_json_lines_with_keys(run.metrics).values
    return tuple(record["loss"] for record in records if "loss" in record)


def _misplaced_ranks_text_or_empty(run: RunDir, plan: Plan) -> str:
    """Return a text on the ranks whose variables differ from the plan; empty if there is none."""
    variables_by_rank = {
        path.name: json.loads(path.read_text()) for path in (run.path / "ranks").glob("[0-9]*")
    }
    misplaced_ranks = [
        rank.rank for rank in plan.ranks if variables_by_rank.get(str(rank.rank)) != list(rank)
    ]
    return (
        f"RANKS DIFFER from the plan ({', '.join(map(str, misplaced_ranks))})"
        if misplaced_ranks
        else ""
    )

"""Start a trial of a sweep: on its share of this machine or of the hosts, or as a job of Slurm."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from ortlaunch.api.inputs import LoadedRecipe
from ortlaunch.api.plan import resolve_loaded_recipe
from ortlaunch.api.submit import Submission
from ortlaunch.api.train import check_and_start_detached_run_in_new_folder
from ortlaunch.base import machine
from ortlaunch.base.errors import PlanError
from ortlaunch.base.forked_process import ForkedProcess
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch.prepared import PreparedProcess
from ortlaunch.launch.record import JobRecord
from ortlaunch.planning.hosts import Host, filter_hosts_by_include_or_exclude, read_hostfile
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.schedulers import slurm
from ortlaunch.started_runs.queued import is_queued
from ortlaunch.started_runs.status import read_status

# Between requests to Slurm's controller on a job; its metrics are read more often.
_QUEUE_SECONDS = 5.0
# Of a job: its hosts are unknown until it starts.
QUEUED_TRIAL_OPTIONS = LaunchOptions(planned_only=True, declared=True)


class TrialResources(NamedTuple):
    """The part of the machine of one of the trials that run at the same time."""

    environ: Mapping[str, str]
    """Variables beside those of this process."""
    options: LaunchOptions


class QueuedTrial:
    """A trial that is a job of Slurm, with methods of Popen; it outlives the sweep's command."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next_poll_seconds = 0.0

    def poll(self) -> int | None:
        """Return the exit status of the job; None while it is queued or runs."""
        if time.monotonic() < self._next_poll_seconds:
            return None
        self._next_poll_seconds = time.monotonic() + _QUEUE_SECONDS
        status = read_status(self._run)
        return status.job.exit_status if status.state.is_end else None

    def terminate(self) -> None:
        """Leave the job in the queue."""

    def wait(self) -> int:
        """Return at once."""
        return 0


TrialProcess = subprocess.Popen[bytes] | ForkedProcess | QueuedTrial


def queued_trial_of(run: RunDir) -> QueuedTrial | None:
    """Return the job of a trial, which may have ended; None if there is none."""
    record = JobRecord.read_or_none_refusing_damaged(run)
    return QueuedTrial(run) if record and is_queued(record) else None


def start_or_queue_trial(
    loaded: LoadedRecipe,
    trial_resources: TrialResources,
    run: RunDir,
    prepared_process: PreparedProcess,
) -> TrialProcess:
    """Start a trial, or queue it; errors are those of `train` and `submit`."""
    if not trial_resources.options.declared:
        return check_and_start_detached_run_in_new_folder(
            loaded,
            trial_resources.options,
            run.path,
            environ_if_ends_with_caller=trial_resources.environ,
            prepared_process=prepared_process,
        )[1]
    Submission(resolve_loaded_recipe(loaded, trial_resources.options), run, run.path).queue_job()
    return QueuedTrial(run)


def divide_hosts_or_gpus_among_concurrent_trials(
    recipe: Recipe, launch_options: LaunchOptions, environ: Mapping[str, str] = os.environ
) -> list[TrialResources]:
    """Return the share of each trial that runs at the same time.

    Raises:
        PlanError: there are fewer GPUs or hosts than trials, or hosts are given for jobs.
        HostfileError: the host file is wrong.
        MissingDependency: this host cannot queue jobs.
    """
    assert recipe.sweep is not None
    parallel = recipe.sweep.parallel
    if recipe.sweep.submit:
        if launch_options != LaunchOptions(typed=launch_options.typed):
            raise PlanError(
                "sweep.submit: Slurm chooses the hosts of a trial; leave out options of hosts and "
                "launcher, and set launch.nodes and launch.processes_per_node"
            )
        slurm.require_sbatch()
        return [TrialResources({}, QUEUED_TRIAL_OPTIONS)] * parallel
    if parallel == 1:
        return [TrialResources({}, launch_options)]
    if launch_options.hostfile:
        per_node = launch_options.processes_per_node or recipe.launch.processes_per_node
        listed = read_hostfile(launch_options.hostfile, per_node).hosts
        hosts = [
            *map(
                _include_filter,
                filter_hosts_by_include_or_exclude(
                    listed, launch_options.include, launch_options.exclude
                ),
            )
        ]
        hosts_per_trial = _count_per_trial_or_refuse_too_few(len(hosts), parallel, "host")
        host_filters = (
            "@".join(hosts[hosts_per_trial * slot : hosts_per_trial * (slot + 1)])
            for slot in range(parallel)
        )
        return [
            TrialResources({}, launch_options._replace(include=part, exclude=None))
            for part in host_filters
        ]
    return [
        TrialResources(part, launch_options)
        for part in _gpu_and_thread_environ_of_each_trial(recipe, parallel, environ)
    ]


def _include_filter(host: Host) -> str:
    """Return a host with its slots as --include has it."""
    name = host.name.rpartition("@")[2]
    return f"{f'[{name}]' if ':' in name else name}:{','.join(map(str, host.devices))}"


def _count_per_trial_or_refuse_too_few(
    available_count: int, parallel_trials: int, resource_noun: str
) -> int:
    if available_count < parallel_trials:
        raise PlanError(
            f"sweep.parallel: got {parallel_trials}, and {count_with_noun(available_count, resource_noun)} for them"
        )
    return available_count // parallel_trials


def _gpu_and_thread_environ_of_each_trial(
    recipe: Recipe, parallel_trials: int, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    gpus = 0 if recipe.launch.device == "cpu" else machine.visible_gpu_count(environ)
    gpus_per_trial = _count_per_trial_or_refuse_too_few(gpus, parallel_trials, "GPU") if gpus else 0
    names = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    ranks = recipe.launch.processes_per_node or gpus_per_trial or 1
    threads = environ.get("OMP_NUM_THREADS") or str(
        machine.threads_per_rank(parallel_trials * ranks)
    )
    parts = [
        names[gpus_per_trial * slot : gpus_per_trial * (slot + 1)]
        for slot in range(parallel_trials)
    ]
    return [
        {"OMP_NUM_THREADS": threads, **({"CUDA_VISIBLE_DEVICES": ",".join(part)} if gpus else {})}
        for part in parts
    ]

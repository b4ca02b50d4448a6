"""The checks of `ortlaunch doctor`, on a host file's hosts, a Slurm job's, or this machine.

If the hosts are fit, ranks measure their compute rates and the links between them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base import machine
from ortlaunch.base.errors import OrtlaunchError, PlanError, RunError, first_message_line
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.doctor import fabric, hosts, this_host
from ortlaunch.doctor.finding import FAILED, WARNING, Finding
from ortlaunch.doctor.hosts import HostRequirements
from ortlaunch.launch.processes import forward_signals_until_job_ends, write_files_and_start_job
from ortlaunch.launch_plan import Node
from ortlaunch.planning.hosts import (
    filter_hosts_by_include_or_exclude,
    parse_hostfile,
    read_hostfile_text,
)
from ortlaunch.planning.slurm_names import slurm_job_hosts_or_empty
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.recipe.fields.data import BATCHES_EACH_WORKER
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.tables.tasks import BatchBytesRequest, run_task_and_return_stdout_or_raise

# Ranks that only measure need a recipe, of which they train nothing.
_MEASURED_RECIPE = Path("bert-large/tiny")
_MEASURED_OVERRIDES = ("engine.name=eager", "batch={micro_size: 1, accumulation_steps: 1}")


class CheckupOptions(NamedTuple):
    """Options of the command line beside recipe and hosts; None: the recipe's value."""

    folder: Path | None = None
    device: str | None = None
    interface: str | None = None
    port: int = 0
    port_range: range | None = None


def requirements_of_run_on_hosts(resolved: ResolvedRun, run_folder: Path) -> HostRequirements:
    """Return the requirements of a run on its hosts."""
    world = resolved.world
    recipe = resolved.recipe_file.recipe
    # One more than are kept: the oldest is deleted after the newest has been written.
    checkpoints_on_disk = (recipe.checkpoint.keep or 1) + 1
    needed_bytes = (
        resolved.workload.memory.checkpoint * checkpoints_on_disk if resolved.workload.memory else 0
    )
    return HostRequirements(
        world.nodes, world.device, run_folder, needed_bytes, interface=recipe.launch.interface
    )


def check_hosts_or_this_machine(
    recipe_path_or_none: Path | None,
    overrides: tuple[str, ...],
    launch_options: LaunchOptions,
    checkup_options: CheckupOptions,
    environ: Mapping[str, str],
) -> list[Finding]:
    """Return all findings, in the order of the hosts; those of ranks that measure come last.

    Raises:
        InputError: the recipe or the host file is wrong.
    """
    # Nothing is trained from here, so resources that only other hosts have may be absent here.
    _refuse_options_without_effect(launch_options, recipe_path_or_none is not None)
    launch_options = _options_with_slurm_hosts_unless_given(launch_options, environ)
    folder = Path(os.path.abspath(checkup_options.folder or "."))
    resolved = (
        load_and_resolve_recipe(
            recipe_path_or_none, overrides, launch_options._replace(planned_only=True), environ
        )
        if recipe_path_or_none
        else None
    )
    requirements = (
        requirements_of_run_on_hosts(resolved, folder)
        if resolved
        else HostRequirements(
            _nodes_of_hostfile_or_empty(launch_options),
            # As `launch.device: auto` of a recipe.
            "cuda" if machine.visible_gpu_count(environ) else "cpu",
            folder,
        )
    )
    requirements = requirements._replace(
        device=checkup_options.device or requirements.device,
        interface=checkup_options.interface or requirements.interface,
        port=checkup_options.port,
        port_range=checkup_options.port_range,
    )
    chosen_recipe = resolved.recipe_file.recipe if resolved else None
    data_findings = []
    try:
        requirements = requirements._replace(
            shared_memory_bytes=_measure_data_workers_shared_memory_bytes(resolved)
            if resolved
            else 0
        )
    except RunError as error:
        data_findings = [Finding(this_host.THIS_HOST, "data", FAILED, first_message_line(error))]
    if not launch_options.hostfile:
        return data_findings + this_host.check_this_host_and_recipe_packages(
            requirements, chosen_recipe, resolved.world if resolved else None
        )
    findings = data_findings + hosts.probe_and_judge_all_hosts(requirements)
    # Two names of one machine would measure itself.
    for finding in findings:
        if finding.verdict == FAILED or finding.check == "alias":
            observation = f"not started, because of {finding.check} of {finding.host}"
            return [*findings, Finding("all", "ranks", WARNING, observation, "mend that first")]
    recipe_path = recipe_path_or_none or _MEASURED_RECIPE
    if recipe_path_or_none is None:
        overrides = (f"launch.device={requirements.device}", *_MEASURED_OVERRIDES)
    try:
        return findings + _measure_by_ranks_and_judge(
            load_and_resolve_recipe(
                recipe_path, overrides, launch_options._replace(task="fabric"), environ
            ),
            folder,
        )
    except OrtlaunchError as error:
        return [*findings, Finding("all", "ranks", FAILED, first_message_line(error))]


def _measure_by_ranks_and_judge(resolved_run: ResolvedRun, shared_folder: Path) -> list[Finding]:
    """Start ranks as for a training, and return findings on their measured rates and links.

    Their run folder is removed, unless they fail.
    """
    if resolved_run.world.enclosing_rank is not None:
        raise PlanError("this process is a rank of a launcher already; run doctor outside of it")
    plan = resolved_run.plan
    run = RunDir(Path(tempfile.mkdtemp(prefix="ortlaunch-doctor-", dir=shared_folder)))
    request = write_run_files_and_clear_earlier_start(run, resolved_run.recipe_file.recipe, plan)
    output_path = run.path / "output.txt"
    # The ranks are a part of this command: SIGUSR1, too, has to end them.
    job = write_files_and_start_job(request._replace(notice_ends=True), output_path)
    verdict = conclude_run(
        run,
        forward_signals_until_job_ends(job),
        job.user_signal,
        job.foreign_signal,
        job.oom_kills,
    )
    if verdict.exit_status and job.user_signal is None:
        return [
            Finding(
                "all", "ranks", FAILED, verdict.explanation or verdict.message, f"see {output_path}"
            )
        ]
    measurements = {} if verdict.exit_status else read_json_or_raise_damaged(run.fabric)
    shutil.rmtree(run.path)
    if job.user_signal is not None:
        sys.exit(128 + job.user_signal)
    return fabric.findings_on_matmul_links_and_all_reduce(measurements, plan.nodes)


def _measure_data_workers_shared_memory_bytes(resolved: ResolvedRun) -> int:
    """Return the bytes of the batches that the data workers of one host hold in /dev/shm.

    Raises:
        RunError: the data cannot be read here.
    """
    recipe = resolved.recipe_file.recipe
    if not recipe.data.workers:
        return 0
    batch = BatchBytesRequest(
        dump_recipe_yaml(recipe),
        str(resolved.command.modules_folder),
        resolved.workload.batch.micro_samples,
    )
    ranks = max(node.slots for node in resolved.world.nodes)
    return (
        int(run_task_and_return_stdout_or_raise(batch))
        * recipe.data.workers
        * BATCHES_EACH_WORKER
        * ranks
    )


def _refuse_options_without_effect(launch_options: LaunchOptions, has_recipe: bool) -> None:
    has_ranks = has_recipe or launch_options.hostfile
    if not has_ranks and (launch_options.launcher or launch_options.processes_per_node):
        raise PlanError(
            "--launcher and --nproc-per-node need a recipe or --hostfile: they set ranks"
        )
    if launch_options.hostfile is None and (launch_options.include or launch_options.exclude):
        raise PlanError("--include and --exclude need a host file: give --hostfile")


def _options_with_slurm_hosts_unless_given(
    launch_options: LaunchOptions, environ: Mapping[str, str]
) -> LaunchOptions:
    job_hosts = () if launch_options.hostfile else slurm_job_hosts_or_empty(environ)
    if not job_hosts:
        return launch_options
    text = "".join(f"{host.name} slots={host.slots}\n" for host in job_hosts)
    return launch_options._replace(hostfile="SLURM_JOB_NODELIST", hosts_text=text)


def _nodes_of_hostfile_or_empty(launch_options: LaunchOptions) -> tuple[Node, ...]:
    """Return the hosts for a checkup without a recipe; none stands for this host."""
    if launch_options.hostfile is None:
        return ()
    text = (
        read_hostfile_text(launch_options.hostfile)
        if launch_options.hosts_text is None
        else launch_options.hosts_text
    )
    listed = filter_hosts_by_include_or_exclude(
        parse_hostfile(text, launch_options.hostfile, 1).hosts,
        launch_options.include,
        launch_options.exclude,
    )
    return tuple(Node(host.name, host.slots, 0, host.devices) for host in listed)

"""Name a run's folder and check the run before its start. No process is started here."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from ortlaunch import doctor
from ortlaunch.base.errors import PlanError
from ortlaunch.base.process import read_process_stat_or_none
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import Rank
from ortlaunch.resolve import resume
from ortlaunch.resolve.prepare import (
    read_earlier_or_else_given_recipe_or_none,
    refuse_foreign_folder_or_return_continuing_lines,
    require_launcher_can_start_hosts,
)
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import ResumeOptions, RunBeginning
from ortlaunch.run import choices
from ortlaunch.run.run_completion import (
    continue_command_if_train_was_typed,
    nothing_to_train_text_if_readable,
)
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.tables.launchers import LAUNCHERS


def requested_or_proposed_run_folder(
    requested_folder: Path | None, resolved: ResolvedRun, environ: Mapping[str, str]
) -> RunDir:
    """Return the folder of a new run: `--run-dir`, else runs/<name>-<timestamp>.

    Ranks of one launcher get the same folder.

    Raises:
        PlanError: the path has a control character, or the ranks cannot agree on a folder.
    """
    name = resolved.recipe_file.recipe.name
    rank = resolved.world.enclosing_rank
    absolute_path = os.path.abspath(requested_folder or ".")
    if control_character := re.search(r"[\x00-\x1f\x7f-\x9f]", absolute_path):
        raise PlanError(
            f"--run-dir: {absolute_path!r} has the control character {control_character[0]!r}; give a path without it"
        )
    if requested_folder is not None:
        return RunDir(requested_folder)
    if rank is None or rank.world_size == 1:
        # Each rank runs this function at another second, so a time is no common name.
        return RunDir(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    launch = launch_id_shared_by_ranks_or_none(rank, environ)
    if launch is None:
        raise PlanError(
            "the launcher gives the ranks no common name for the run folder; add --run-dir, "
            "the same for all ranks"
        )
    return RunDir(Path("runs") / f"{name}-{launch}")


def launch_id_shared_by_ranks_or_none(rank: Rank, environ: Mapping[str, str]) -> str | None:
    """Return an id that all ranks of this launch share and no other launch has; None if unknown."""
    # On one host the launcher is the parent; its start time excludes a later one of the same id.
    if rank.local_world_size == rank.world_size:
        parent = os.getppid()
        stat = read_process_stat_or_none(parent)
        return f"{parent}-{stat.started if stat else 0}"
    if environ.get("SLURM_STEP_ID"):
        # A requeued job keeps its id, so the number of its restarts is added.
        return (
            f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
            f".{environ.get('SLURM_RESTART_COUNT', '0')}"
        )
    for name in ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PALS_APID"):
        # "none" is torchrun's default id, the same for all launches.
        if environ.get(name) and environ[name] != "none":
            return "".join(c if c.isalnum() else "-" for c in environ[name])
    return None


def ready_marker_path(run: RunDir, rank: Rank) -> Path:
    """Return the file with which rank 0 marks the folder as prepared for this launch."""
    return run.ready / (launch_id_shared_by_ranks_or_none(rank, os.environ) or "launch")


def requested_or_absent_folder_for_checks(run: RunDir, requested_folder: Path | None) -> RunDir:
    """Return the folder of the checks before `claimed`: of a new run, one that does not exist."""
    # Another start in this second may have the folder by now.
    return run if requested_folder is not None else RunDir(Path(f"{run}-{os.getpid()}"))


def create_run_folder_or_numbered_one(run: RunDir) -> RunDir:
    """Create the folder for this run alone."""
    # Runs that start in the same second must not share one: mkdir succeeds for one of them.
    path = run.path
    for suffix in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
        path = Path(f"{run}-{suffix}")
    return RunDir(path)


def startable_run_beginning_and_done_text_or_refuse(
    resolved: ResolvedRun, run: RunDir, resume_options: ResumeOptions
) -> tuple[ResolvedRun, RunBeginning, str | None]:
    """Check that the run can start; write nothing and make no plan.

    Returns:
        The run with recorded choices; its beginning, with the lines to print about it; and the
        result of `nothing_to_train_text_with_command_or_none`.

    Raises:
        InputError, PlanError, MissingDependency: the run cannot start; the message has the remedy.
    """
    finished_text = nothing_to_train_text_with_command_or_none(resolved, run, resume_options)
    resolved = choices.apply_recorded_engine_and_micro_size(resolved, run)
    doctor.require_packages_and_extensions_installed(resolved.recipe_file.recipe, resolved.world)
    require_launcher_can_start_hosts(resolved.world, run)
    earlier_run = read_earlier_or_else_given_recipe_or_none(run, resolved)
    lines = refuse_foreign_folder_or_return_continuing_lines(run, earlier_run, resolved)
    return (
        resolved,
        resume.choose_checkpoint_and_list_or_refuse_changes(
            run, resolved, earlier_run, resume_options
        ).prepend_lines(lines),
        finished_text,
    )


def nothing_to_train_text_with_command_or_none(
    resolved: ResolvedRun, run: RunDir, resume_options: ResumeOptions
) -> str | None:
    """Return the lines to print if no step is left to train; None if the ranks have to run."""
    finished_text = (
        None
        if resume_options.begins_earlier
        else nothing_to_train_text_if_readable(resolved.recipe_file.recipe, run)
    )
    if finished_text is None:
        return None
    command = continue_command_if_train_was_typed(
        resolved.typed_arguments, resolved.recipe_file.recipe, run
    )
    return Verdict(0, finished_text, continue_command=command).render()


def record_success_unless_recorded(run: RunDir) -> None:
    """Record that the run is complete."""
    job = JobRecord.read_or_none_refusing_damaged(run)
    # The earlier command was killed after the last step: job.json has it running, or failed.
    if job is not None and job.backend in LAUNCHERS and job.state is not JobState.SUCCEEDED:
        job.copy_ended_now(JobState.SUCCEEDED, Verdict(0, f"done: {run}")).write(run)

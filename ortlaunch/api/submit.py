"""`ortlaunch submit`: write the run folder and the job, and queue the job. Starts nothing here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe
from ortlaunch.api.inputs import (
    RecipeSource,
    dotted_assignments_from_section_overrides,
    load_recipe_with_path_and_overrides,
)
from ortlaunch.api.plan import resolve_loaded_recipe
from ortlaunch.api.runs import Run
from ortlaunch.base import module_start
from ortlaunch.base.errors import InputError, PlanError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch.record import JobRecord, current_time_iso
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import inputs
from ortlaunch.resolve.prepare import (
    read_earlier_or_else_given_recipe_or_none,
    refuse_foreign_folder_or_return_continuing_lines,
)
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun
from ortlaunch.run import micro_size
from ortlaunch.run.preparation import (
    create_run_folder_or_numbered_one,
    requested_or_absent_folder_for_checks,
    requested_or_proposed_run_folder,
)
from ortlaunch.run.preview import apply_known_engine_if_auto_without_measuring
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.schedulers import SCHEDULERS, QueuedRun, load_scheduler
from ortlaunch.started_runs import registry
from ortlaunch.started_runs.status import read_status
from ortlaunch.user_modules import unloadable_factory_problems


def submit(
    source: RecipeSource,
    *assignments: str,
    scheduler: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    **overrides: object,
) -> Run:
    """Queue a recipe in a scheduler, as `ortlaunch submit` does; `status().job.id` is the job's id.

    Args:
        source, assignments, overrides: as in `load`.
        scheduler: `slurm`, `kubernetes` or `azureml`; None: the recipe's.
        run_dir: the run folder; None: a new one in `runs`.

    Raises:
        InputError: the recipe or the run folder is wrong, or the scheduler is not installed.
        LaunchError: the scheduler refused the job.
    """
    requested_folder = None if run_dir is None else Path(run_dir)
    all_assignments = (*assignments, *dotted_assignments_from_section_overrides(overrides))
    submission = Submission.resolve_for_scheduler(
        source, all_assignments, scheduler, requested_folder
    )
    return Run(submission.queue_job().run.path)


class QueuedJob(NamedTuple):
    """A job that was queued."""

    job_id: str
    """The job's id."""
    run: RunDir
    text_lines: tuple[str, ...]
    """Lines for the user."""


class Submission(NamedTuple):
    """A run that is resolved for a scheduler."""

    resolved: ResolvedRun
    run: RunDir
    requested_folder: Path | None
    """The run folder as given."""

    @classmethod
    def resolve_for_scheduler(
        cls,
        source: RecipeSource,
        assignments: tuple[str, ...],
        scheduler: str | None,
        run_dir: Path | None,
    ) -> Submission:
        """Resolve a recipe for its scheduler; errors are those of `submit`."""
        if scheduler is not None and scheduler not in SCHEDULERS:
            raise InputError(f"scheduler: got {scheduler}; one of {', '.join(SCHEDULERS)}")
        # Last, so that it wins: inside the job the command chooses the launcher for the given
        # hosts.
        scheduler_assignment = f"submit.scheduler={scheduler}"
        all_assignments = (
            *assignments,
            *([scheduler_assignment] if scheduler else []),
            "launch.launcher=auto",
        )
        loaded = load_recipe_with_path_and_overrides(source, all_assignments, {})
        trains_elsewhere = SCHEDULERS[loaded.file.recipe.submit.scheduler].is_elsewhere
        # The hosts are unknown until the job starts.
        options = LaunchOptions(planned_only=True, declared=True, elsewhere=trains_elsewhere)
        resolved_run = resolve_loaded_recipe(loaded, options)
        if resolved_run.recipe_file.recipe.sweep is not None:
            raise InputError(
                "sweep: a job is one run; `ortlaunch sweep` with sweep.submit=true queues a job for "
                "each trial, and sweep=null queues the recipe's own values"
            )
        return cls(
            resolved_run,
            requested_or_proposed_run_folder(run_dir, resolved_run, os.environ),
            run_dir,
        )

    @property
    def scheduler(self) -> str:
        """The scheduler's name."""
        return self.resolved.recipe_file.recipe.submit.scheduler

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        return [*self.resolved.notes, *notes_on_ignored_submit_and_binding_fields(self.resolved)]

    def preview_scheduler_request(self) -> LaunchRequest:
        """Return what would be sent to the scheduler, with a known engine instead of `auto`."""
        known_run = apply_known_engine_if_auto_without_measuring(self.resolved)
        return self._replace(resolved=known_run).scheduler_request()

    def scheduler_request(self) -> LaunchRequest:
        """Return the request for the scheduler, without side effects."""
        job_recipe = self.resolved.recipe_file.recipe
        _refuse_unsupported_restarts(job_recipe)
        # Paths of this host's Python do not exist in an image.
        has_container = job_recipe.submit.container is not None
        cli_argv = ("ortlaunch",) if has_container else module_start.module_command("ortlaunch.cli")
        conclude_argv = (
            ("python3", "-m", "ortlaunch.started_runs.ended")
            if has_container
            else module_start.module_command("ortlaunch.started_runs.ended")
        )
        queued_run = QueuedRun(
            plan=self.resolved.plan,
            run=RunDir(os.path.abspath(self.run.path)),
            train=(
                *cli_argv,
                "train",
                os.path.abspath(self.run.submitted),
                "--run-dir",
                os.path.abspath(self.run.path),
            ),
            conclude=(
                *conclude_argv,
                os.path.abspath(self.run.path),
                str(job_recipe.launch.max_restarts),
            ),
            folder=os.getcwd(),
            variables=((MODULES_VARIABLE, os.path.abspath(self.resolved.command.modules_folder)),),
            options=job_recipe.submit.model_dump(mode="json"),
            recipe=recipe.dump_recipe_yaml(job_recipe),
            restarts=job_recipe.launch.max_restarts,
            secrets=job_recipe.launch.forward,
        )
        return load_scheduler(self.scheduler).submission_request_of_job(queued_run)

    def queue_job(self) -> QueuedJob:
        """Write the files from which the job begins, and queue the job.

        Raises:
            PlanError: the folder has other contents, or a run in it has not ended.
            RecipeError: a file or function of the user is absent, although the nodes share this disk.
        """
        run = self.run
        job_recipe = self.resolved.recipe_file.recipe
        input_problems = [
            *inputs.absent_or_lfs_pointer_input_problems(job_recipe),
            *inputs.column_and_vocabulary_problems(job_recipe),
            *unloadable_factory_problems(job_recipe, self.resolved.command.modules_folder),
        ]
        # An image or another cluster has files that this host need not have.
        if not SCHEDULERS[self.scheduler].is_elsewhere and job_recipe.submit.container is None:
            self.resolved.recipe_file.raise_if_problems(input_problems)
        # The ranks of a job of several cannot start the trials that find a size.
        if micro_size.is_search_requested(job_recipe) and self.resolved.world.rank_count > 1:
            micro_size.refuse_micro_size_search_in_rank()
        if (
            self.requested_folder is not None
            and run.job.exists()
            and not read_status(run).state.is_end
        ):
            raise PlanError(
                f"--run-dir {run}: its run has not ended, or is queued; `ortlaunch cancel {run}` "
                "ends it"
            )
        checked_run = requested_or_absent_folder_for_checks(run, self.requested_folder)
        notes = refuse_foreign_folder_or_return_continuing_lines(
            checked_run,
            read_earlier_or_else_given_recipe_or_none(checked_run, self.resolved),
            self.resolved,
        )
        run = create_run_folder_or_numbered_one(run) if self.requested_folder is None else run
        run.logs.mkdir(parents=True, exist_ok=True)
        # Not recipe.yaml: rank 0 writes that file when it prepares the folder.
        write_text_atomically(run.submitted, recipe.dump_recipe_yaml(job_recipe))
        job_id = load_scheduler(self.scheduler).write_files_and_queue_job(
            self._replace(run=run).scheduler_request()
        )
        # After the submission, because the record needs the job's id.
        JobRecord(
            self.scheduler,
            job_id,
            socket.gethostname(),
            "",
            "",
            current_time_iso(),
            JobState.PENDING,
        ).write(run)
        registry.register_run_or_print_error(run)
        return QueuedJob(job_id, run, (*notes, f"run folder: {run}"))


def _refuse_unsupported_restarts(job_recipe: recipe.Recipe) -> None:
    """Check that the scheduler can start the run again after a fault, if the recipe requests it.

    Raises:
        PlanError: it cannot.
    """
    submit = job_recipe.submit
    reason = ""
    if submit.scheduler == "azureml":
        reason = "Azure ML has no restart of a command job"
    elif (
        submit.scheduler == "kubernetes"
        and submit.kubernetes
        and submit.kubernetes.kind == "trainjob"
    ):
        reason = (
            "a TrainJob has no such field; failurePolicy.maxRestarts of the runtime's JobSet "
            "applies"
        )
    elif not submit.requeue:
        reason = "the job may not be queued again (submit.requeue: false)"
    if reason and job_recipe.launch.max_restarts:
        raise PlanError(
            f"launch.max_restarts: {job_recipe.launch.max_restarts} is not supported: {reason}; set it "
            "to 0"
        )


def notes_on_ignored_submit_and_binding_fields(resolved_run: ResolvedRun) -> list[str]:
    """Return a note on fields of `submit` for Slurm that have no effect on another scheduler."""
    submit_section = resolved_run.recipe_file.recipe.submit
    # Fields of Slurm alone: neither common ones nor the sections of the other schedulers.
    slurm_fields = set(type(submit_section).model_fields) - {"scheduler", "requeue", *SCHEDULERS}
    ignored_fields = [
        name
        for name, value in submit_section.model_dump(exclude_defaults=True).items()
        if name in slurm_fields
    ]
    binding = resolved_run.recipe_file.recipe.launch.binding
    if submit_section.scheduler == "slurm" and binding in ("core", "numa"):
        return [f"launch.binding: {binding} has no effect: in a job Slurm binds the ranks"]
    if submit_section.scheduler == "slurm" or not ignored_fields:
        return []
    return [
        f"ignored by {submit_section.scheduler}: {', '.join(f'submit.{name}' for name in ignored_fields)}"
    ]

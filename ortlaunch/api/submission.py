"""Prepare a submission to a scheduler, show it or send it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ortlaunch.api.inputs import RecipeSource, load_recipe_with_path_and_overrides
from ortlaunch.api.plans import resolve_loaded_recipe
from ortlaunch.base.errors import InputError
from ortlaunch.commands.submit import (
    QueuedJob,
    check_write_submission_and_queue_and_register_job,
    notes_on_ignored_submit_and_binding_fields,
    scheduler_request_of_run,
)
from ortlaunch.launch import LaunchRequest
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run.preparation import requested_or_proposed_run_folder
from ortlaunch.run.preview import apply_known_engine_if_auto_without_measuring
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.schedulers import SCHEDULERS


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

    def scheduler_request(self) -> LaunchRequest:
        """Return what would be sent to the scheduler."""
        return scheduler_request_of_run(
            apply_known_engine_if_auto_without_measuring(self.resolved), self.run, self.scheduler
        )

    def queue_job(self) -> QueuedJob:
        """Queue the job."""
        return check_write_submission_and_queue_and_register_job(
            self.resolved, self.requested_folder, self.run, self.scheduler
        )

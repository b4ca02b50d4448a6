"""Show a run for `plan` and `--dry-run`. Starts, measures and writes nothing.

A person waits for the output, so modules that only a run needs (supervision, a bench) are imported
on use.
"""

from __future__ import annotations

import os

from ortlaunch.base.errors import PlanError
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.resolve.prepare import launch_request
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run.preparation import startable_run_beginning_and_done_text_or_refuse
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged


def preview_lines_and_launch_command(
    resolved: ResolvedRun, run: RunDir, resume_options: ResumeOptions
) -> tuple[list[str], str]:
    """Return the lines that `train` prints before its start, and the command that would run.

    The lines give the beginning, the changes since the checkpoint, and the plan.

    Raises:
        InputError, PlanError, MissingDependency: `train` would refuse the run.
    """
    resume_options = resume_options.require_known_allow_names()
    resolved, beginning, finished_text = startable_run_beginning_and_done_text_or_refuse(
        resolved, run, resume_options
    )
    resolved = apply_known_engine_if_auto_without_measuring(resolved)
    command = str(launch_request(resolved.plan, run))
    # The nearest folder that exists; the folders below it would be created in it.
    existing_parent = next(
        path for path in (run.path.absolute(), *run.path.absolute().parents) if path.exists()
    )
    # A preview creates no folder, so the permission to create it is checked here.
    if not os.access(existing_parent, os.W_OK | os.X_OK):
        raise PlanError(
            f"{run}: cannot be created: no permission to write to {existing_parent}; give another --run-dir"
        )
    lines = [
        *beginning.text_lines,
        *([finished_text] if finished_text else []),
        *resolved.notes,
        plan_description_text(resolved.plan, resolved.recipe_file.recipe),
        *_recorded_training_length_lines(run),
    ]
    return lines, command


def _recorded_training_length_lines(run: RunDir) -> list[str]:
    """Return the steps that lengths in epochs came to, where the run began before."""
    if not run.steps.exists():
        return []
    length_texts = (
        f"{name.replace('_', ' ')} {value}"
        for name, value in read_json_or_raise_damaged(run.steps).items()
    )
    return [f"as this run began ({run.steps.name}): {', '.join(length_texts)}"]


def apply_known_engine_if_auto_without_measuring(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the engine that `auto` would choose now, without measuring."""
    if resolved.recipe_file.recipe.engine.name != "auto":
        return resolved
    from ortlaunch.bench import auto

    return auto.apply_cached_engine_or_note_later_measurement(resolved)


def notes_on_undetermined_micro_size(resolved: ResolvedRun) -> list[str]:
    """Return notes on a micro size that is not known yet."""
    if resolved.recipe_file.recipe.batch.micro_size != "auto":
        return []
    from ortlaunch.run import micro_size

    return micro_size.undetermined_micro_size_lines(resolved.plan)

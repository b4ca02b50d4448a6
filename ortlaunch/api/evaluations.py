"""Evaluate a checkpoint in processes of its own, and wait for the result."""

from __future__ import annotations

from ortlaunch.api.detached import (
    launch_options_as_command_arguments,
    start_detached_and_await_job_file_or_raise,
)
from ortlaunch.api.run_wait import wait_for_run_end_or_raise
from ortlaunch.base.json_types import Json
from ortlaunch.commands.evaluate import evaluation_launch_request_text
from ortlaunch.commands.export import existing_requested_or_newest_step_or_refuse
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.tables.tasks import CheckpointStep


def start_evaluation_and_await_result(
    run: RunDir,
    assignments: tuple[str, ...],
    requested_step: CheckpointStep,
    launch_options: LaunchOptions,
    show_progress: bool,
) -> Json:
    """Measure a checkpoint; arguments, result and errors are those of `Run.evaluate`."""
    chosen_checkpoint_step = existing_requested_or_newest_step_or_refuse(run, requested_step)
    # Errors are raised here, before anything starts.
    evaluation_launch_request_text(run, chosen_checkpoint_step, assignments, launch_options)
    folder = run.evaluation_folder(chosen_checkpoint_step)
    command = [
        "evaluate",
        str(run),
        *assignments,
        f"--step={chosen_checkpoint_step}",
        *launch_options_as_command_arguments(launch_options),
    ]
    start_detached_and_await_job_file_or_raise(command, folder, {})
    wait_for_run_end_or_raise(folder, show_progress)
    return dict(read_json_or_raise_damaged(folder.evaluation))

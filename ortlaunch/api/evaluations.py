"""Evaluate a checkpoint in processes of its own, and wait for the result."""

from __future__ import annotations

from ortlaunch.api.detached import launch_option_arguments, start_detached_command
from ortlaunch.api.waiting import wait_for_run_end
from ortlaunch.commands.evaluate import evaluation_request_text
from ortlaunch.commands.export import requested_or_newest_step
from ortlaunch.json_types import Json
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.tasks import CheckpointStep


def evaluate_checkpoint(
    run: RunDir,
    assignments: tuple[str, ...],
    step: CheckpointStep,
    options: LaunchOptions,
    show_progress: bool,
) -> Json:
    """Measure a checkpoint; arguments, result and errors are those of `Run.evaluate`."""
    chosen_checkpoint_step = requested_or_newest_step(run, step)
    # Errors are raised here, before anything starts.
    evaluation_request_text(run, chosen_checkpoint_step, assignments, options)
    folder = run.evaluation_folder(chosen_checkpoint_step)
    command = [
        "evaluate",
        str(run),
        *assignments,
        f"--step={chosen_checkpoint_step}",
        *launch_option_arguments(options),
    ]
    start_detached_command(command, folder, {})
    wait_for_run_end(folder, show_progress)
    return dict(read_own_json(folder.evaluation))

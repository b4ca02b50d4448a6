"""Runs of this process, which print: for the command line, whose process the run is.

`train` and `Run.evaluate` of the API start that command line in processes of their own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.base.process import signals_to_handle
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import preview
from ortlaunch.run.preparation import requested_or_proposed_run_folder
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import CheckpointStep


def train_or_print_dry_run(
    recipe_path: Path,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
    requested_folder: Path | None,
    resume_options: ResumeOptions,
    dry_run: bool,
) -> int:
    """Run the ranks, and return the run's exit status.

    Args:
        recipe_path: its path, or the name of a shipped one.
        overrides: `key.path=value` of the command line.
        launch_options: launcher, hosts and ranks.
        requested_folder: the run folder; None: a new one.
        resume_options: values of --resume and --allow.
        dry_run: whether to print the command that would run, and on standard error the lines
            before a start, instead of running it.
    """
    resolved = load_and_resolve_recipe(recipe_path, overrides, launch_options, os.environ)
    if not dry_run:
        # Not needed for a dry run, and slow to import.
        from ortlaunch.run import control

        return control.lock_folder_and_run_training(resolved, requested_folder, resume_options)
    run = requested_or_proposed_run_folder(requested_folder, resolved, os.environ)
    lines, command = preview.preview_lines_and_launch_command(resolved, run, resume_options)
    print(*lines, sep="\n", file=sys.stderr)
    print(command)
    return 0


def evaluate_checkpoint_in_foreground(
    run_folder: Path,
    requested_step: CheckpointStep,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
) -> int:
    """Measure a checkpoint, and return the exit status."""
    from ortlaunch.commands import evaluate as evaluations

    return evaluations.evaluate_checkpoint_in_own_run(
        RunDir(run_folder), requested_step, tuple(overrides), launch_options
    )


def evaluation_command_text(
    run_folder: Path,
    requested_step: CheckpointStep,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
) -> str:
    """Return the command that would measure a checkpoint."""
    from ortlaunch.commands import evaluate as evaluations

    return evaluations.evaluation_launch_request_text(
        RunDir(run_folder), requested_step, tuple(overrides), launch_options
    )


def handle_signals_and_run_and_print_sweep(
    recipe_path: Path, overrides: Sequence[str], launch_options: LaunchOptions, run_dir: Path | None
) -> int:
    """Run the trials of a sweep, print a line for each, and return the exit status."""
    from ortlaunch.api import sweeps

    for signal_number in signals_to_handle((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        ended_sweep = sweeps.sweep(
            recipe_path, *overrides, run_dir=run_dir, options=launch_options, progress=True
        )
    except KeyboardInterrupt:
        print(
            "stopped; its trials are saved or queued, and the same command continues them",
            file=sys.stderr,
        )
        return EXIT_SAVED
    print(ended_sweep)
    return 0

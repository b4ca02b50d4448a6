"""Runs of this process, which print: for the command line, whose process the run is.

`train` and `Run.evaluate` of the API start that command line in processes of their own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.planning.world import LaunchOptions
from ortlaunch.process import signals_to_handle
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve.resolve import resolve_command
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run import preview
from ortlaunch.run.preparation import new_or_requested_run_folder
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tasks import CheckpointStep


def train_in_foreground(
    recipe: Path,
    overrides: Sequence[str],
    options: LaunchOptions,
    run_dir: Path | None,
    resume: ResumeOptions,
    dry_run: bool,
) -> int:
    """Run the ranks, and return the run's exit status.

    Args:
        recipe: its path, or the name of a shipped one.
        overrides: `key.path=value` of the command line.
        options: launcher, hosts and ranks.
        run_dir: the run folder; None: a new one.
        resume: values of --resume and --allow.
        evaluation_request_text: whether to print the command that would run, and on standard error the lines
            before a start, instead of running it.
    """
    resolved = resolve_command(recipe, overrides, options, os.environ)
    if not dry_run:
        # Not needed for a dry run, and slow to import.
        from ortlaunch.run import control

        return control.run_training_command(resolved, run_dir, resume)
    run = new_or_requested_run_folder(run_dir, resolved, os.environ)
    lines, command = preview.preview_start(resolved, run, resume)
    print(*lines, sep="\n", file=sys.stderr)
    print(command)
    return 0


def evaluate_in_foreground(
    run: Path, step: CheckpointStep, overrides: Sequence[str], options: LaunchOptions
) -> int:
    """Measure a checkpoint, and return the exit status."""
    from ortlaunch.commands import evaluate as evaluations

    return evaluations.evaluate_checkpoint(RunDir(run), step, tuple(overrides), options)


def evaluation_command(
    run: Path, step: CheckpointStep, overrides: Sequence[str], options: LaunchOptions
) -> str:
    """Return the command that would measure a checkpoint."""
    from ortlaunch.commands import evaluate as evaluations

    return evaluations.evaluation_request_text(RunDir(run), step, tuple(overrides), options)


def sweep_in_foreground(
    recipe: Path, overrides: Sequence[str], options: LaunchOptions, run_dir: Path | None
) -> int:
    """Run the trials of a sweep, print a line for each, and return the exit status."""
    from ortlaunch.api import sweeps

    for signal_number in signals_to_handle((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        ended_sweep = sweeps.sweep(
            recipe, *overrides, run_dir=run_dir, options=options, progress=True
        )
    except KeyboardInterrupt:
        print(
            "stopped; its trials are saved or queued, and the same command continues them",
            file=sys.stderr,
        )
        return EXIT_SAVED
    print(ended_sweep)
    return 0

"""`ortlaunch train`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ortlaunch.cli.options import (
    AllowOption,
    DryRun,
    Overrides,
    RecipePath,
    ResumeOption,
    RunDirOption,
    with_launch_options,
)
from ortlaunch.output import go_on_unread


@with_launch_options
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    options: Any = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = "auto",
    allow: AllowOption = None,
    dry_run: DryRun = False,
) -> None:
    """Train a recipe."""
    start(recipe, overrides or (), options, run_dir, dry_run, (resume, tuple(allow or ())))


def start(
    recipe: Path,
    overrides: Sequence[str],
    options: Any,
    run_dir: Path | None,
    dry_run: bool,
    resume: tuple[str, tuple[str, ...]] = ("auto", ()),
) -> None:
    """Run the ranks and exit with the run's status; with `dry_run` only print the command.

    Args:
        recipe: its path, or the name of a shipped one.
        overrides: KEY.PATH=VALUE of the command line.
        options: launcher, hosts and ranks.
        run_dir: the run folder; None: a new one.
        dry_run: whether to print the command instead of running it.
        resume: values of --resume and --allow.
    """
    from ortlaunch.resolve.prepare import run_folder
    from ortlaunch.resolve.resolve import resolve
    from ortlaunch.resolve.resume import ResumeOptions
    from ortlaunch.run import preview

    resolved = resolve(recipe, overrides, options, os.environ)
    if dry_run:
        resolved = preview.preview(resolved)
        run = run_folder(run_dir, resolved, os.environ)
        # On standard error, so that standard output has only the command.
        print(
            *preview.before_start(resolved, run, ResumeOptions(*resume)), sep="\n", file=sys.stderr
        )
        typer.echo(preview.dry_run(resolved, run))
        return
    # Not needed for a dry run, and slow to import.
    from ortlaunch.run import control

    # A training must not end because the reader of its output has (`| head`).
    go_on_unread()
    raise typer.Exit(control.train(resolved, run_dir, ResumeOptions(*resume)))

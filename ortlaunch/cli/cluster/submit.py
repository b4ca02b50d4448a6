"""`ortlaunch submit`."""

import os
import sys
from typing import Annotated

import typer

from ortlaunch.cli.options import DryRun, Overrides, RecipePath, RunDirOption


def submit(
    recipe: RecipePath,
    overrides: Overrides = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            help="slurm, kubernetes or azureml; the recipe's submit.scheduler by default.",
        ),
    ] = None,
    run_dir: RunDirOption = None,
    dry_run: DryRun = False,
) -> None:
    """Queue a recipe in a scheduler: launch.nodes hosts, launch.processes_per_node ranks on each.

    Standard output has only the job's id. `ortlaunch status`, `logs` and `cancel` accept the run
    folder.
    """
    from ortlaunch.commands.submit import request_of, submit, without_effect
    from ortlaunch.planning.world import LaunchOptions
    from ortlaunch.resolve.prepare import run_folder
    from ortlaunch.resolve.resolve import resolve
    from ortlaunch.run.preview import preview
    from ortlaunch.schedulers import SCHEDULERS

    if scheduler is not None and scheduler not in SCHEDULERS:
        raise typer.BadParameter(
            f"got {scheduler}; one of {', '.join(SCHEDULERS)}", param_hint="--scheduler"
        )
    # Last, so that it wins: inside the job the command chooses the launcher for the given hosts.
    given = (
        *(overrides or ()),
        *([f"submit.scheduler={scheduler}"] if scheduler else []),
        "launch.launcher=auto",
    )
    # The hosts are unknown until the job starts.
    resolved = resolve(recipe, given, LaunchOptions(planned_only=True, declared=True), os.environ)
    name = resolved.file.recipe.submit.scheduler
    run = run_folder(run_dir, resolved, os.environ)
    notes = [*resolved.notes, *without_effect(resolved)]
    # Standard output is for scripts, which read the job's id from it.
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    if dry_run:
        typer.echo(str(request_of(preview(resolved), run, name)))
        return
    typer.echo(submit(resolved, run_dir, run, name))

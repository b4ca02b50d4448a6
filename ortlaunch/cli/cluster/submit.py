"""`ortlaunch submit`."""

import shlex
import sys
from collections.abc import Sequence
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
    from ortlaunch.api.submit import Submission

    submission = Submission.resolve_for_scheduler(
        recipe, tuple(overrides or ()), scheduler, run_dir
    )
    # Standard output is for scripts, which read the job's id from it.
    if dry_run:
        _print_notes(submission.notes)
        request = submission.preview_scheduler_request()
        typer.echo(request.files[0][1], nl=False)
        _print_notes([f"would be {request.files[0][0]}, sent by: {shlex.join(request.argv)}"])
        return
    queued = submission.queue_job()
    # After it: a missing file is a note of the one and an error of the other.
    _print_notes([*submission.notes, *queued.text_lines])
    typer.echo(queued.job_id)


def _print_notes(notes: Sequence[str]) -> None:
    if notes:
        print(*notes, sep="\n", file=sys.stderr)

"""`ortlaunch logs`: the output of a run's ranks."""

import sys
from typing import Annotated

import typer

from ortlaunch.cli.runs.status import RunFolder


def logs(
    run: RunFolder,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose output is printed.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")
    ] = False,
) -> None:
    """Print the output of a run's rank 0 or of another rank; for a queued run its job's output.

    With --follow the exit status is the run's own, else 0; 2 if there is no run.
    """
    from ortlaunch.api.runs import Run

    selected_run = Run(run)
    is_empty = True
    for piece in selected_run.logs(rank, follow):
        is_empty = False
        sys.stdout.write(piece)
        sys.stdout.flush()
    if is_empty:
        print(f"no output: {selected_run.status()}", file=sys.stderr)
    if follow:
        raise typer.Exit(selected_run.status().job.exit_status or 0)

"""`ortlaunch list`: the runs of this user. The columns are in started_runs/runs_table.py."""

import json as texts  # the verb's option is called json
from typing import Annotated

import typer


def list_runs(
    name: Annotated[
        str,
        typer.Argument(help="A part of the folder's path, with * and ?.", show_default=False),
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="As JSON: `status --json` of each run.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="All runs, not only the newest 20.")] = False,
    state: Annotated[str | None, typer.Option("--state", help="Only this state.")] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Only within a limit, as 'evaluation_loss<1.5'."),
    ] = None,
) -> None:
    """List the runs that this user started or queued, the newest first.

    Columns: state, step, newest loss and metric, time, folder; under a failed run the reason.
    """
    from ortlaunch.api.runs import runs_table, statuses
    from ortlaunch.base.output import output_columns

    # Each run costs the reading of several files, perhaps on a slow disk.
    run_statuses = statuses(None if every else 20, name, state, metric)
    if json:
        # `to_json` returns text, and a list needs values.
        typer.echo(
            texts.dumps([texts.loads(status.to_json()) for status in run_statuses], indent=2)
        )
        return
    typer.echo(runs_table(run_statuses, output_columns()))

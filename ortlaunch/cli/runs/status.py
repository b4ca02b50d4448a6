"""`ortlaunch status`, `compare`, `stop`, `checkpoint`, `restart` and `cancel`: query and control runs
of other commands."""

import json as texts  # the option of verbs is called json
import sys
from pathlib import Path
from typing import Annotated

import typer

import ortlaunch


def resolve_run_folder_and_print_if_by_name(name_or_path: Path) -> Path:
    """Return the folder of a run that is given by name; a path is returned unchanged."""
    from ortlaunch.api.runs import run_folder_by_name_or_path

    run_folder = run_folder_by_name_or_path(name_or_path)
    if run_folder != name_or_path:
        print(f"run: {run_folder}", file=sys.stderr, flush=True)
    return run_folder


# The callback replaces a name by its folder before the verb runs.
RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run folder, as `ortlaunch train` prints it; `latest`: the newest training "
        "in this folder or below it; a run's name: the newest run of that name; or the beginning of one folder's name.",
        show_default=False,
        callback=resolve_run_folder_and_print_if_by_name,
    ),
]


def status(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="The whole status as JSON.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for its end, and exit with the run's status.")
    ] = False,
) -> None:
    """Show a run: state, ranks, last step, loss, speed; after its end the verdict.

    Exit status 0 in every state, 2 if there is no run; with --wait the run's own.
    """
    from ortlaunch.base.output import output_columns
    from ortlaunch.base.units import wrap_long_lines_except_commands

    run_status = ortlaunch.Run(run).wait(check=False) if wait else ortlaunch.Run(run).status()
    status_text = run_status.to_json() if json else str(run_status)
    typer.echo(
        status_text if json else wrap_long_lines_except_commands(status_text, output_columns())
    )
    if wait:
        raise typer.Exit(run_status.job.exit_status or 0)


def compare(
    first: RunFolder,
    second: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="The lines as a JSON list.")] = False,
) -> None:
    """Print what differs between two runs: recipe, world, data, code, packages, and the result.

    Each line is FIELD: FIRST -> SECOND. `ortlaunch plan --diff` compares runs before they start.
    """
    lines = ortlaunch.Run(first).compare(ortlaunch.Run(second))
    if json:
        typer.echo(texts.dumps(lines, indent=2))
        return
    typer.echo("\n".join(lines) if lines else f"{second} is the same as {first}")


def stop(
    run: RunFolder,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
) -> None:
    """Let a run finish its step, save and end: `train` exits with 85, and continues when run again.

    Exit status 0 after its end (with --no-wait after the request), also if it had ended before; 1
    if it ended otherwise; 2 if there is no run, or none that can save.
    """
    result = ortlaunch.Run(run).stop(wait)
    typer.echo(result.text)
    raise typer.Exit(result.exit_status)


def checkpoint(run: RunFolder) -> None:
    """Let a run save a checkpoint after its next step, and print which one; the run continues.

    Exit status 0 after the checkpoint is complete; 1 if the run ended or could not save; 2 if there
    is no run that trains.
    """
    folder = ortlaunch.Run(run).checkpoint()
    typer.echo(f"saved after step {int(folder.name.removeprefix('step_'))}: {folder}")


def restart(run: RunFolder) -> None:
    """Let an elastic run (launch.nodes: {min, max}) save and start again on all available hosts.

    Exit status 0 after the new start; 1 if the run ended; 2 if there is no run that trains, or its
    hosts are fixed.
    """
    typer.echo(ortlaunch.Run(run).restart())


def cancel(run: RunFolder) -> None:
    """End a run with all its processes; its ranks get SIGTERM, and SIGKILL after a grace period.

    Exit status 0 after its end, also if it had ended before; 1 if it does not end; 2 if there is no
    run, or this user cannot end it from this host.
    """
    typer.echo(ortlaunch.Run(run).cancel())

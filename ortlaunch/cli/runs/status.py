"""`ortlaunch status`, `stop`, `checkpoint`, `restart` and `cancel`: a run that another command has, or had."""

from pathlib import Path
from typing import Annotated

import typer


def by_name(given: Path) -> Path:
    """The folder of a run that is given by its name; what is a path stays."""
    from ortlaunch.runs.registry import named

    return named(given)


RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Run folder, as `ortlaunch train` prints it; `latest`, or a run's name: the newest of it.",
        show_default=False,
        callback=by_name,
    ),
]


def status(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for its end; the exit status is then the run's.")
    ] = False,
) -> None:
    """Say how a run goes or went: state, ranks, last step, loss, speed; once it has ended its verdict.

    Exit status 0 in every state, 2 where there is no run; with --wait the run's own.
    """
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.runs import status as statuses

    found = (statuses.wait if wait else statuses.look)(RunDir(run))
    typer.echo(found.to_json() if json else str(found))
    if wait:
        raise typer.Exit(found.job.exit_status or 0)


def stop(
    run: RunFolder,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for its end.")] = True,
) -> None:
    """Ask a run to finish its step, save and end: `train` leaves with status 85, and goes on when it is run again.

    Exit status 0 once it has (with --no-wait once it is asked), also where it had ended before; 1 where it ended
    otherwise; 2 where there is no run, or none that can save.
    """
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.runs.requests import stop as ask

    said, exit_status = ask(RunDir(run), wait)
    typer.echo(said)
    raise typer.Exit(exit_status)


def checkpoint(run: RunFolder) -> None:
    """Have a run save a checkpoint after its next step, and say which; it trains on.

    Exit status 0 once it is complete; 1 where the run ended or could not save; 2 where there is no run that trains.
    """
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.runs.requests import checkpoint as ask

    typer.echo(ask(RunDir(run)))


def restart(run: RunFolder) -> None:
    """Have an elastic run (launch.nodes: {min, max}) save and start again, on all of its hosts that are there now.

    Exit status 0 once it has; 1 where it ended; 2 where there is no run that trains, or one of fixed hosts.
    """
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.runs.requests import restart as ask

    typer.echo(ask(RunDir(run)))


def cancel(run: RunFolder) -> None:
    """End a run with all its processes; its ranks get SIGTERM, and SIGKILL after a grace.

    Exit status 0 once it has ended, also where it had before; 1 where it does not; 2 where there is no run, or not one
    that this user can end from this host.
    """
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.runs.cancel import cancel as end

    typer.echo(end(RunDir(run)))

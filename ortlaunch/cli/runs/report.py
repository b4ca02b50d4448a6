"""`ortlaunch report`: write runs as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.runs.status import resolve_run_folder_and_print_if_by_name


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folders or names; several are compared in one page.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="File of the page; report.html in the run's folder by default, or here for "
            "several runs.",
        ),
    ] = None,
) -> None:
    """Write one HTML page of runs: curves, engine, memory, checkpoints, differences of recipes.

    It reads only the run folders, and a run may still be running. The page needs no network.
    """
    from ortlaunch.api.runs import write_report

    # Typer calls a callback once for the whole list, so names are resolved here.
    typer.echo(
        f"report: {write_report([resolve_run_folder_and_print_if_by_name(run) for run in runs], to)}"
    )

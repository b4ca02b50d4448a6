"""`ortlaunch sweep`."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import ortlaunch
from ortlaunch.base.output import continue_without_output
from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.options import (
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    RanksPerHostOption,
    RecipePath,
    launch_options_from_typed_values,
)


class _SweepVerbs(Verbs):
    """The verbs of `ortlaunch sweep`, of which `run` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first_argument = next(iter(args), "-")
        arguments = (
            args
            if first_argument.startswith("-") or first_argument in self.commands
            else ["run", *args]
        )
        return super().parse_args(ctx, arguments)


app = typer.Typer(
    cls=_SweepVerbs,
    help="Search fields of a recipe; each trial is a run. `ortlaunch sweep RECIPE` is `sweep run`.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the sweep.")]


@app.command(cls=Verb, short_help="Run the trials of a recipe's section sweep, or continue them.")
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Folder of the sweep; sweeps/NAME by default. An existing one is continued.",
        ),
    ] = None,
) -> None:
    """Run the trials of a recipe's section sweep; the same command continues them."""
    from ortlaunch.base.process import signals_to_handle
    from ortlaunch.rank import EXIT_SAVED

    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    # A sweep must not end because the reader of its output has.
    continue_without_output()
    for signal_number in signals_to_handle((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        ended_sweep = ortlaunch.sweep(
            recipe, *(overrides or ()), run_dir=run_dir, options=options, progress=True
        )
    except KeyboardInterrupt:
        text = "stopped; its trials are saved or queued, and the same command continues them"
        print(text, file=sys.stderr)
        raise typer.Exit(EXIT_SAVED) from None
    print(ended_sweep)


@app.command(cls=Verb, short_help="Print a table of the trials.")
def status(folder: Folder) -> None:
    """Print a table of the trials."""
    typer.echo(ortlaunch.Sweep(folder))


@app.command(cls=Verb, short_help="Print the recipe of the best trial.")
def best(folder: Folder) -> None:
    """Print the recipe of the best trial; with several metrics of each that no other one beats."""
    opened_sweep = ortlaunch.Sweep(folder)
    typer.echo(
        "".join(
            opened_sweep.recipe(best_trial.number).read_text() for best_trial in opened_sweep.best()
        ),
        nl=False,
    )


@app.command(cls=Verb, short_help="Write one HTML page of the runs of all trials.")
def report(
    folder: Folder,
    to: Annotated[
        Path | None, typer.Option("--to", help="The page; report.html in the folder by default.")
    ] = None,
) -> None:
    """Write one HTML page of the runs of all trials: curves, and what differs."""
    typer.echo(ortlaunch.Sweep(folder).report(to))


@app.command(cls=Verb, short_help="Print all trials as JSON.")
def export(folder: Folder) -> None:
    """Print all trials as JSON: fields, metrics, state, run folder."""
    typer.echo(ortlaunch.Sweep(folder).to_json())

"""`ortlaunch evaluate`."""

from typing import Annotated, Any, Optional

import typer

from ortlaunch.cli.options import DryRun, Overrides, with_launch_options
from ortlaunch.cli.status import RunFolder
from ortlaunch.output import go_on_unread


@with_launch_options
def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    step: Annotated[Optional[int], typer.Option("--step", min=1, help="Which checkpoint; the newest if not.")] = None,
    options: Any = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a checkpoint on data.evaluation: loss, perplexity, accuracy; into RUN/evaluations/step_N."""
    from ortlaunch.run import evaluate as evaluations
    from ortlaunch.run.folder import RunDir

    asked = evaluations.Asked(RunDir(run), step, tuple(overrides or ()))
    if dry_run:
        typer.echo(evaluations.dry_run(asked, options))
        return
    go_on_unread()
    raise typer.Exit(evaluations.evaluate(asked, options))

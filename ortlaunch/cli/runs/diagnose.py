"""`ortlaunch diagnose`: explain why a run ended."""

from typing import Annotated

import typer

from ortlaunch.cli.runs.status import RunFolder


def diagnose(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="The diagnosis as JSON.")] = False,
) -> None:
    """Explain why a run failed: the verdict, then the evidence, then what to try.

    It reads only the run folder. Exit status 0 with any verdict, 2 if there is no run.
    """
    from ortlaunch.api.runs import Run

    diagnosis = Run(run).diagnose()
    typer.echo(diagnosis.to_json() if json else str(diagnosis))

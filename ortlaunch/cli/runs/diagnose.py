"""`ortlaunch diagnose`: why a run ended as it did."""

from typing import Annotated

import typer

from ortlaunch.cli.runs.status import RunFolder


def diagnose(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="The diagnosis as JSON.")] = False,
) -> None:
    """Say why a run failed: the verdict first, then what it rests on, then what to try.

    It reads the run folder alone. Exit status 0 whatever the verdict, 2 where there is no run.
    """
    from ortlaunch.diagnose.report import diagnose as diagnosis_of
    from ortlaunch.run_folder.folder import RunDir

    found = diagnosis_of(RunDir(run))
    typer.echo(found.to_json() if json else str(found))

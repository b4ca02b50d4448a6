"""`ortlaunch ranks`."""

import os

import typer


def ranks() -> None:
    """Say which rank this process is: each launcher's variables that are seen, which set is used, or why none can be.

    It stands in the place of your command, as in `mpirun -n 4 ortlaunch ranks`. Exit status 2: it is not clear.
    """
    from ortlaunch.errors import RankError
    from ortlaunch.rank import detect, explain

    typer.echo(explain(os.environ))
    try:
        detect(os.environ)
    except RankError as error:
        raise typer.Exit(error.exit_status) from None

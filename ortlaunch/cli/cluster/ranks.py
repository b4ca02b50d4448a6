"""`ortlaunch ranks`."""

import os

import typer


def ranks() -> None:
    """Show which rank this process is: the variables of each launcher, and the set that is used.

    Run it in place of your command, as in `mpirun -n 4 ortlaunch ranks`. Exit status 2 if the
    variables do not determine a rank.
    """
    from ortlaunch.base.errors import RankError
    from ortlaunch.rank import rank_and_launcher_name_or_none, rank_variables_explanation_text

    # Printed first: the explanation helps most if no rank can be determined.
    typer.echo(rank_variables_explanation_text(os.environ))
    try:
        rank_and_launcher_name_or_none(os.environ)
    except RankError as error:
        raise typer.Exit(error.exit_status) from None

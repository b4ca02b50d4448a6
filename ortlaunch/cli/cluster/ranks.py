"""`ortlaunch ranks`."""

import json
import os
from typing import Annotated

import typer


def ranks(
    as_json: Annotated[bool, typer.Option("--json", help="The rank as JSON.")] = False,
) -> None:
    """Show which rank this process is: the variables of each launcher, and the set that is used.

    Run it in place of your command, as in `mpirun -n 4 ortlaunch ranks`. Exit status 2 if the
    variables do not determine a rank.
    """
    from ortlaunch.base.errors import RankError
    from ortlaunch.rank import Rank, rank_and_launcher_name_or_none, rank_variables_explanation_text

    if as_json:
        rank_and_launcher = rank_and_launcher_name_or_none(os.environ)
        rank, launcher_name = rank_and_launcher or (Rank.from_environ(os.environ), None)
        typer.echo(json.dumps({"launcher": launcher_name, **rank._asdict()}, indent=2))
        return
    # Printed first: the explanation helps most if no rank can be determined.
    typer.echo(rank_variables_explanation_text(os.environ))
    try:
        rank_and_launcher_name_or_none(os.environ)
    except RankError as error:
        raise typer.Exit(error.exit_status) from None

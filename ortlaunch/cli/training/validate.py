"""`ortlaunch validate`."""

from typing import Annotated

import typer

from ortlaunch.cli.options import Overrides, RecipePath


def validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            "--no-files",
            help="For another machine: report missing files as notes, not errors.",
        ),
    ] = False,
) -> None:
    """Check a recipe; all errors at once, each with its location.

    Data files, local models and your own functions must exist here, except with launch.nodes above
    1 or --elsewhere.
    """
    from ortlaunch.api.inputs import validate as check  # the verb has the same name

    typer.echo(check(recipe, *(overrides or ()), elsewhere=elsewhere))

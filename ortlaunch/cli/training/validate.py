"""`ortlaunch validate`."""

import json
from dataclasses import asdict
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
    as_json: Annotated[bool, typer.Option("--json", help="Validity and problems as JSON.")] = False,
) -> None:
    """Check a recipe; all errors at once, each with its location.

    Data files, local models and your own functions must exist here, except with launch.nodes above
    1 or --elsewhere.
    """
    from ortlaunch.api.inputs import validate as check  # the verb has the same name

    if not as_json:
        typer.echo(check(recipe, *(overrides or ()), elsewhere=elsewhere))
        return
    from ortlaunch.api.json_outputs import RecipeCheck
    from ortlaunch.base.errors import RecipeError

    try:
        notes = check(recipe, *(overrides or ()), elsewhere=elsewhere).notes
        result = RecipeCheck(str(recipe), True, notes=notes)
    except RecipeError as error:
        result = RecipeCheck(str(recipe), False, error.problems)
    typer.echo(json.dumps(asdict(result), indent=2))
    raise typer.Exit(0 if result.valid else RecipeError.exit_status)

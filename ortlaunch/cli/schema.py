"""`ortlaunch schema`."""

from typing import Annotated

import typer


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The same as a page to read: docs/recipe.md.")] = False,
) -> None:
    """Print the recipe's JSON schema, for editors: every field with its manual."""
    if markdown:
        from ortlaunch.recipe.reference import markdown as text
    else:
        from ortlaunch.recipe.schema import json_schema as text
    typer.echo(text(), nl=False)

"""`ortlaunch validate`."""

from typing import Annotated

import typer

from ortlaunch.cli.options import Overrides, RecipePath
from ortlaunch.errors import RecipeError


def validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere", help="For another machine: files that are missing here are notes."
        ),
    ] = False,
) -> None:
    """Check a recipe; all errors at once, each with its location.

    Data files, local models and your own functions must exist here, but for launch.nodes above 1 or --elsewhere.
    """
    from ortlaunch.recipe import load
    from ortlaunch.resolve import inputs
    from ortlaunch.resolve.shipped import locate

    recipe = locate(recipe)
    loaded = load(recipe, overrides or ())
    missing = (
        *inputs.missing_files(loaded.recipe, beside=recipe.parent),
        *inputs.broken_factories(loaded.recipe, recipe.parent),
        *inputs.unknown_type(loaded.recipe),
    )
    lines = [loaded.explain(problem) for problem in missing]
    if lines and not elsewhere and loaded.recipe.launch.nodes in (None, 1):
        raise RecipeError(
            [*lines, "if they exist on the machine that trains: ortlaunch validate --elsewhere"]
        )
    lines += map(loaded.explain, inputs.doubtful(loaded.recipe))
    auto = (
        "; engine auto: measured when training starts"
        if loaded.recipe.engine.name == "auto"
        else ""
    )
    typer.echo("\n".join([f"{recipe}: valid ({loaded.recipe.name}{auto})", *lines]))

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

    Data files, local models and your own functions must exist here, except with launch.nodes above
    1 or --elsewhere.
    """
    from ortlaunch.recipe import load
    from ortlaunch.resolve import inputs
    from ortlaunch.resolve.shipped import locate

    recipe = locate(recipe)
    loaded = load(recipe, overrides or ())
    # These need the disk; `load` has checked everything that the text alone shows.
    missing = (
        *inputs.missing_files(loaded.recipe, beside=recipe.parent),
        *inputs.broken_factories(loaded.recipe, recipe.parent),
        *inputs.unknown_type(loaded.recipe),
    )
    lines = [loaded.explain(problem) for problem in missing]
    # With several nodes this machine may only submit the run, so missing files are notes.
    if lines and not elsewhere and loaded.recipe.launch.nodes in (None, 1):
        raise RecipeError(
            [*lines, "if they exist on the machine that trains: ortlaunch validate --elsewhere"]
        )
    # Notes only: the recipe may be right.
    lines += map(loaded.explain, inputs.doubtful(loaded.recipe))
    auto = (
        "; engine auto: measured when training starts"
        if loaded.recipe.engine.name == "auto"
        else ""
    )
    typer.echo("\n".join([f"{recipe}: valid ({loaded.recipe.name}{auto})", *lines]))

"""`ortlaunch validate`."""

import typer

from ortlaunch.cli.options import Overrides, RecipePath
from ortlaunch.errors import RecipeError


def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe; all errors at once, each with its place."""
    from ortlaunch.recipe import load
    from ortlaunch.run import inputs
    from ortlaunch.run.shipped import locate

    recipe = locate(recipe)
    loaded = load(recipe, overrides or ())
    functions = [loaded.explain(problem) for problem in inputs.broken_factories(loaded.recipe, recipe.parent)]
    if functions and loaded.recipe.launch.nodes in (None, 1):
        raise RecipeError(functions)
    files = [loaded.explain(problem) for problem in inputs.missing_files(loaded.recipe)]
    auto = "; engine auto: measured when training starts" if loaded.recipe.engine.name == "auto" else ""
    typer.echo("\n".join([f"{recipe}: valid ({loaded.recipe.name}{auto})", *files, *functions]))

"""`ortlaunch data`: prepare the data of a training."""

import typer

from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.options import Overrides, RecipePath

app = typer.Typer(cls=Verbs, help="Prepare the data of a training.", no_args_is_help=True)


@app.command(cls=Verb, short_help="Read and tokenize a recipe's data into the cache.")
def prepare(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Read and tokenize a recipe's data into the cache, as `train` does."""
    from ortlaunch.commands.prepare_data import prepare as run
    from ortlaunch.recipe import load
    from ortlaunch.resolve.shipped import locate

    raise typer.Exit(run(load(locate(recipe), overrides or ()).recipe))

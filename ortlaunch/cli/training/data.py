"""`ortlaunch data`: prepare and inspect the data of a training."""

from typing import Annotated

import typer

import ortlaunch
from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.options import Overrides, RecipePath

app = typer.Typer(
    cls=Verbs, help="Prepare and inspect the data of a training.", no_args_is_help=True
)


@app.command(cls=Verb, short_help="Read and tokenize a recipe's data into the cache.")
def prepare(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Read and tokenize a recipe's data into the cache, as `train` does."""
    from ortlaunch.api.data import tokenize_data_into_cache as run

    raise typer.Exit(run(ortlaunch.load(recipe, *(overrides or ()))))


@app.command(cls=Verb, short_help="Show samples as the model will see them, and audit the data.")
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Samples of each part.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Samples and audit as JSON.")] = False,
) -> None:
    """Show samples as the model will see them, and audit the data.

    Text that counts in the loss is green, or within [[ ]]. The audit has the lengths of rows,
    classes, and findings such as cut rows, duplicates, or evaluation rows in the training data.
    """
    from ortlaunch.api.data import show_samples as run

    raise typer.Exit(run(ortlaunch.load(recipe, *(overrides or ())), samples, as_json))

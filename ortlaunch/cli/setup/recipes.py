"""`ortlaunch recipes list`, `show` and `copy`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.options import shipped_recipes

app = typer.Typer(cls=Verbs, help="The shipped recipes: list, show, copy.", no_args_is_help=True)
Name = Annotated[
    str,
    typer.Argument(
        help="A name that `ortlaunch recipes list` prints.", autocompletion=shipped_recipes
    ),
]


@app.command("list", cls=Verb)
def list_recipes(
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
) -> None:
    """List the shipped recipes: model, method, memory."""
    from ortlaunch.resolve.catalog import shipped_recipe_table_lines, shipped_recipes_with_memory

    recipes = shipped_recipes_with_memory()
    if as_json:
        typer.echo(json.dumps([asdict(recipe) for recipe in recipes], indent=2))
    else:
        typer.echo("\n".join(shipped_recipe_table_lines(recipes)))


@app.command("show", cls=Verb)
def show_recipe(name: Name) -> None:
    """Print a shipped recipe."""
    from ortlaunch.resolve.shipped import shipped_recipe_path_or_refuse

    # Without another newline, so that `> my.yaml` is an exact copy.
    typer.echo(shipped_recipe_path_or_refuse(name).read_text(encoding="utf-8"), nl=False)


@app.command("copy", cls=Verb, short_help="Copy a shipped recipe with the files it needs.")
def copy_recipe(
    name: Name,
    target: Annotated[Path, typer.Argument(help="File or folder to copy it to.")] = Path(),
) -> None:
    """Copy a shipped recipe, with what it extends and its modules; never over a file of yours."""
    import ortlaunch
    from ortlaunch.base.output import output_columns
    from ortlaunch.base.units import wrap_long_lines_except_commands
    from ortlaunch.resolve.shipped import copy_shipped_recipe_and_dependencies

    copied = copy_shipped_recipe_and_dependencies(name, target)
    typer.echo("\n".join(map(str, copied)))
    # A recipe for a GPU, or for data that are not here yet, has notes.
    for note in ortlaunch.validate(copied[0], elsewhere=True).notes:
        typer.echo(wrap_long_lines_except_commands(note, output_columns()), err=True)

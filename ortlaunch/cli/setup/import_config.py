"""`ortlaunch import`: convert another tool's config to a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.options import Overrides, shipped_recipes


def import_config(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="The other tool's YAML or JSON.", show_default=False),
    ],
    overrides: Overrides = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="hf-trainer, axolotl, llama-factory, torchtune, automodel, oumi, accelerate or deepspeed; "
            "detected by default.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="A recipe for settings that the config lacks.",
            autocompletion=shipped_recipes,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File of the new recipe; CONFIG-recipe.yaml here by default."),
    ] = None,
) -> None:
    """Convert another tool's config to a recipe, and report the result for each of its keys.

    The recipe has the same report as comments.
    """
    from ortlaunch.base.errors import InputError
    from ortlaunch.base.output import output_columns
    from ortlaunch.base.units import wrap_long_lines_except_commands
    from ortlaunch.importers import convert_config_to_recipe as turned
    from ortlaunch.resolve.shipped import recipe_path_or_shipped_recipe
    from ortlaunch.run_folder.folder import write_text_atomically

    recipe_path = to or Path(f"{config.stem}-recipe.yaml")
    # An imported recipe may have been edited since.
    if recipe_path.exists():
        raise InputError(f"{recipe_path} exists already; give another file with --to")
    # Written only if the result is valid.
    imported_recipe = turned(
        config, tool, recipe_path_or_shipped_recipe(base) if base else None, overrides or []
    )
    write_text_atomically(recipe_path, imported_recipe.commented_recipe())
    typer.echo(
        wrap_long_lines_except_commands(
            f"{imported_recipe}\nrecipe: {recipe_path}", output_columns()
        )
    )

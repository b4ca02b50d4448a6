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
            help="hf-trainer, axolotl, llama-factory, torchtune, accelerate or deepspeed; detected by default.",
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
    from ortlaunch.errors import InputError
    from ortlaunch.other_tools import import_config as turned
    from ortlaunch.output import output_columns
    from ortlaunch.resolve.shipped import locate
    from ortlaunch.run_folder.folder import write_text_atomically
    from ortlaunch.units import wrap_lines

    target = to or Path(f"{config.stem}-recipe.yaml")
    # An imported recipe may have been edited since.
    if target.exists():
        raise InputError(f"{target} exists already; give another file with --to")
    # Written only if the result is valid.
    found = turned(config, tool, locate(base) if base else None, overrides or [])
    write_text_atomically(target, found.file())
    typer.echo(wrap_lines(f"{found}\nrecipe: {target}", output_columns()))

"""`ortlaunch schema`."""

from typing import Annotated

import typer


def schema(
    context: typer.Context,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The same as a page: docs/reference/recipe.md.")
    ] = False,
    run_folder: Annotated[
        bool,
        typer.Option(
            "--run-folder", help="Files of a run, field by field: docs/reference/run-folder.md."
        ),
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="All verbs and options: docs/reference/cli.md.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="VERB", help="Schema of what `VERB --json` prints."),
    ] = None,
) -> None:
    """Print the recipe's JSON schema, for editors: every field with its manual."""
    # Only the module of the chosen page is imported.
    if output is not None:
        from ortlaunch.api.json_outputs import output_json_schema_text

        typer.echo(output_json_schema_text(output), nl=False)
        return
    if commands:
        from ortlaunch.cli.reference import command_line_manual_page_markdown

        root_command = context.find_root().command
        typer.echo(command_line_manual_page_markdown(root_command), nl=False)
        return
    if run_folder:
        from ortlaunch.run_folder.reference import run_folder_manual_page_markdown as text
    elif markdown:
        from ortlaunch.recipe.manual.reference import recipe_manual_page_markdown as text
    else:
        from ortlaunch.recipe.manual.schema import editor_schema_json_text as text
    # The text ends with a newline, and the files in docs/ must be equal to the byte.
    typer.echo(text(), nl=False)

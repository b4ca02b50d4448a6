"""`ortlaunch constraints`, `hostfile` and `docs`: files that come with the package."""

from typing import Annotated

import typer


def constraints(
    name: Annotated[
        str, typer.Argument(help="torch-2.13, torch-2.6, or floors: the lowest tested versions.")
    ] = "torch-2.13",
) -> None:
    """Print a tested set of versions, for `pip install -c FILE`."""
    from ortlaunch.resolve.shipped import read_shipped_text

    # The file ends with a newline; a copy by `>` is then exact.
    typer.echo(read_shipped_text("constraints", name), nl=False)


def hostfile(
    name: Annotated[str, typer.Argument(help="deepspeed, mpich or openmpi.")] = "openmpi",
) -> None:
    """Print an example of a host file, in the style of a launcher."""
    from ortlaunch.resolve.shipped import read_shipped_text

    typer.echo(read_shipped_text("hostfiles", name), nl=False)


def docs(
    topic: Annotated[
        str, typer.Argument(help="Name of a page, such as engines; none: the list of all.")
    ] = "",
) -> None:
    """Print a page of the documentation, or the list of its pages."""
    from ortlaunch.resolve.shipped import documentation_page_lines, read_shipped_text

    typer.echo(
        read_shipped_text("docs", topic.rpartition("/")[2]).rstrip("\n")
        if topic
        else "\n".join(documentation_page_lines())
    )

"""`ortlaunch setup`."""

import typer


def setup() -> None:
    """Build the torch extensions that engine ort needs, once for each torch."""
    from ortlaunch.doctor import set_up

    raise typer.Exit(set_up())

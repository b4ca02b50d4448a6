"""`ortlaunch setup`."""

import typer


def setup() -> None:
    """Build the torch extensions that engine ort needs, once for each torch."""
    import ortmodule

    # In a process of its own, for the control side never imports torch.
    raise typer.Exit(ortmodule.setup())

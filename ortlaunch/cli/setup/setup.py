"""`ortlaunch setup`."""

import typer


def setup() -> None:
    """Build the torch extensions that engine ort needs, once for each torch."""
    from ortlaunch.doctor import build_ort_extensions

    # In a process of its own, for the control side never imports torch.
    raise typer.Exit(build_ort_extensions())

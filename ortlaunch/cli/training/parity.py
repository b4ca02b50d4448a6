"""`ortlaunch parity`."""

from typing import Annotated

import typer

from ortlaunch.cli.options import (
    DryRun,
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    RanksPerHostOption,
    RecipePath,
    RunDirOption,
    launch_options_from_typed_values,
)
from ortlaunch.cli.training.train import train_or_print_dry_run_and_exit


def parity(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Steps to compare, with optimizer steps between; by default 3, and 1 with parallel.",
        ),
    ] = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    run_dir: RunDirOption = None,
    dry_run: DryRun = False,
) -> None:
    """Compare a recipe's engine with plain PyTorch: loss and every gradient; exit status 1 if they
    differ."""
    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    options = options._replace(task="parity")
    from ortlaunch.api.train import default_compared_step_count

    if steps is None:
        steps = default_compared_step_count(recipe, overrides or ())
    # Last, so that --steps wins over an override of the same key.
    train_or_print_dry_run_and_exit(
        recipe, [*(overrides or ()), f"engine.parity_steps={steps}"], options, run_dir, dry_run
    )

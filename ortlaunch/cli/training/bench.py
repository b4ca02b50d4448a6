"""`ortlaunch bench`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.base.output import continue_without_output
from ortlaunch.cli.options import (
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    RanksPerHostOption,
    RecipePath,
    launch_options_from_typed_values,
)


def bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    engines: Annotated[
        str | None,
        typer.Option("--engines", help="Engines to compare, as ort,eager; all three by default."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="A key and its values, as engine.memory_optimization=0,1; repeat for more keys.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Rounds; each variant runs once per round.")
    ] = 5,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Optimizer steps measured per round.")
    ] = 4,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Restart each variant for every round, if memory does not hold all at once.",
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Also profile each variant: the operators that take longest."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; bench/NAME-TIME by default.")
    ] = None,
    picture: Annotated[
        bool, typer.Option("--picture", help="Also draw bench.png (needs matplotlib).")
    ] = False,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
) -> None:
    """Measure engines and options side by side: speed, memory, time to first step, and parity with
    plain PyTorch."""
    from ortlaunch.bench import command
    from ortlaunch.bench.measure import MeasurementLength
    from ortlaunch.resolve.resolve import load_and_resolve_recipe

    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    profile_override = ["log.profile_steps=[1,6]"] if profile else []
    resolved_run = load_and_resolve_recipe(
        recipe, (*(overrides or ()), *profile_override), options, os.environ
    )
    # Empty: the bench itself chooses all engines.
    engine_names = tuple(name.strip() for name in engines.split(",")) if engines is not None else ()
    length = MeasurementLength(rounds, steps, one_at_a_time)
    # Hours of measurements must not end because the reader of the output has.
    continue_without_output()
    raise typer.Exit(
        command.measure_print_and_write_bench_and_cache_engine(
            resolved_run, engine_names, vary or (), length, out, picture
        )
    )

"""`ortlaunch plan`."""

from pathlib import Path
from typing import Annotated

import typer

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


def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="The whole plan as JSON, stable for diffs.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(
            "--diff",
            metavar="OTHER",
            help="Show only what has changed since OTHER's plan: a recipe (its launch.device auto "
            "is this one's), a run folder or its plan.json.",
        ),
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Predict seconds a step and memory on every engine: count the model's operators, "
            "and once a machine measure their rates. Takes some seconds.",
        ),
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="List the smallest worlds of GPUs that hold the recipe, for each sharding, with "
            "the reason why not smaller; --nproc-per-node has the GPUs of a host.",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="SIZE",
            help="With --fit: memory of a GPU, as 80GiB; that of this host's by default.",
        ),
    ] = None,
) -> None:
    """Show ranks, batch, memory by ZeRO stage and the command, without running anything."""
    from ortlaunch.api.plan import resolve_run_for_planning
    from ortlaunch.base.output import output_columns
    from ortlaunch.base.units import wrap_long_lines_except_commands

    if fit:
        others = {
            "--launcher": launcher,
            "--hostfile": hostfile,
            "--include": include,
            "--exclude": exclude,
            "--diff": diff,
            "--predict": predict,
        }
        if given := [name for name, value in others.items() if value]:
            raise typer.BadParameter(
                f"{given[0]} has no effect with --fit, which has worlds of its own"
            )
        _print_fitting_worlds(recipe, tuple(overrides or ()), gpu, nproc_per_node, json)
        return
    if gpu:
        raise typer.BadParameter("--gpu has no effect without --fit")
    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    planned_run = resolve_run_for_planning(recipe, tuple(overrides or ()), options, {})
    if predict:
        planned_run.predict_step_cost_of_all_engines_into_cache()
    if diff is not None:
        changes = planned_run.differences_from(diff)
        typer.echo("\n".join(changes) if changes else f"same plan as {diff}")
        return
    typer.echo(
        planned_run.plan.to_json()
        if json
        else wrap_long_lines_except_commands(str(planned_run), output_columns())
    )


def _print_fitting_worlds(
    recipe: Path,
    overrides: tuple[str, ...],
    gpu: str | None,
    gpus_per_host: int | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict
    from json import dumps

    from ortlaunch.api.plan import fitting_worlds
    from ortlaunch.base.output import output_columns
    from ortlaunch.base.units import wrap_long_lines_except_commands

    found = fitting_worlds(recipe, *overrides, gpu=gpu, gpus_per_host=gpus_per_host)
    typer.echo(
        dumps([asdict(world) for world in found.worlds], indent=2)
        if as_json
        else wrap_long_lines_except_commands(str(found), output_columns())
    )

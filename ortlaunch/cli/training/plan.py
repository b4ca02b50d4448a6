"""`ortlaunch plan`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ortlaunch.cli.options import Overrides, RecipePath, with_launch_options


@with_launch_options
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    options: Any = None,
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
) -> None:
    """Show ranks, batch, memory by ZeRO stage and the command, without running anything."""
    from ortlaunch.planning.describe import describe
    from ortlaunch.resolve.resolve import resolve
    from ortlaunch.run.preview import dry_run, preview, size_notes
    from ortlaunch.run_folder.folder import RunDir

    # `planned_only`: the hosts of a plan need not exist.
    resolved = preview(
        resolve(recipe, overrides or (), options._replace(planned_only=True), os.environ)
    )
    if diff is not None:
        from ortlaunch.commands.plan_diff import PlanContext, differences, other_plan

        context = PlanContext(
            options._replace(planned_only=True), os.environ, resolved.world.device
        )
        found = differences(other_plan(diff, context), resolved.plan)
        typer.echo("\n".join(found) if found else f"same plan as {diff}")
        return
    if json:
        typer.echo(resolved.plan.to_json())
        return
    # TIME stands for the time of a start: the same recipe always prints the same plan. Only the
    # last line of a request is the command.
    command = dry_run(resolved, RunDir(f"runs/{resolved.plan.name}-TIME")).splitlines()[-1]
    notes = size_notes(resolved)
    shown = describe(resolved.plan, resolved.file.recipe)
    typer.echo("\n".join([*resolved.notes, shown, *notes, f"command: {command}"]))

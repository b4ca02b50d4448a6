"""`ortlaunch evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.base.errors import InputError
from ortlaunch.base.output import continue_without_output
from ortlaunch.cli.options import (
    CheckpointStepOption,
    DryRun,
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    RanksPerHostOption,
    launch_options_from_typed_values,
)
from ortlaunch.cli.runs.status import resolve_run_folder_and_print_if_by_name


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run folder; or a model, which one CPU process evaluates: a model.onnx, its "
            "folder, or the folder of a transformers model.",
            show_default=False,
            callback=resolve_run_folder_and_print_if_by_name,
        ),
    ],
    overrides: Overrides = None,
    step: CheckpointStepOption = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="For a MODEL outside a run folder: recipe with the task and data.evaluation.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For a MODEL: print the results as JSON.")
    ] = False,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    dry_run: DryRun = False,
) -> None:
    """Compute loss and metrics of a run's checkpoint, or of a model, on data.evaluation. The
    result of a checkpoint is in RUN/evaluations/step_N.
    """
    from ortlaunch.api import evaluate as evaluation
    from ortlaunch.run_folder.folder import RunDir

    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    # Options that are only for the other kind of argument are refused, not ignored.
    if evaluation.is_model_path(run):
        _refuse_option(
            "--step" if step else "--dry-run" if dry_run else None,
            run,
            "is a model; this option is for a RUN",
        )
        raise typer.Exit(
            evaluation.evaluate_exported_model_in_process(
                run, recipe, tuple(overrides or ()), as_json
            )
        )
    _refuse_option(
        "--recipe" if recipe else "--json" if as_json else None,
        run,
        "is not a model; this option is for a MODEL",
    )
    evaluation_arguments = RunDir(run), step, tuple(overrides or ()), options
    if dry_run:
        typer.echo(evaluation.evaluation_launch_request_text(*evaluation_arguments))
        return
    # If the output is a pipe whose reader ends, the evaluation continues.
    continue_without_output()
    raise typer.Exit(evaluation.evaluate_checkpoint_in_own_run(*evaluation_arguments))


def _refuse_option(option_name: str | None, given_path: Path, reason: str) -> None:
    if option_name:
        raise InputError(f"{option_name}: {given_path} {reason}")

"""`ortlaunch train`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ortlaunch.base.output import continue_without_output
from ortlaunch.cli.options import (
    AllowOption,
    DryRun,
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    RanksPerHostOption,
    RecipePath,
    ResumeOption,
    RunDirOption,
    launch_options_from_typed_values,
)


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    run_dir: RunDirOption = None,
    continues_newest_run: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Continue the newest run of this recipe, as --run-dir with its folder does.",
        ),
    ] = False,
    resume: ResumeOption = "auto",
    allow: AllowOption = None,
    profile_steps: Annotated[
        str | None,
        typer.Option(
            "--profile-steps",
            metavar="A:B",
            help="Profile these steps: the operators that take longest (log.profile_steps).",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train a recipe."""
    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    if continues_newest_run:
        from ortlaunch.api.train import folder_to_continue_or_refuse

        run_dir = folder_to_continue_or_refuse(recipe, run_dir)
    profiled = (
        []
        if profile_steps is None
        else [f"log.profile_steps=[{','.join(filter(None, profile_steps.split(':')))}]"]
    )
    train_or_print_dry_run_and_exit(
        recipe,
        (*(overrides or ()), *profiled),
        options,
        run_dir,
        dry_run,
        resume,
        allow or (),
    )


def train_or_print_dry_run_and_exit(
    recipe: Path,
    overrides: Sequence[str],
    options: Any,
    run_dir: Path | None,
    dry_run: bool,
    resume: str = "auto",
    allowed_changes: Sequence[str] = (),
) -> None:
    """Run the ranks and exit with the run's status; with `dry_run` only print the command.

    Args:
        recipe: its path, or the name of a shipped one.
        overrides: KEY.PATH=VALUE of the command line.
        options: launcher, hosts and ranks.
        run_dir: the run folder; None: a new one.
        dry_run: whether to print the command instead of running it.
        resume: the value of --resume.
        allowed_changes: the values of --allow.
    """
    from ortlaunch.api.train import ResumeOptions, preview_training, train_in_this_process

    resume_options = ResumeOptions(resume, tuple(allowed_changes))
    arguments = recipe, overrides, options, run_dir, resume_options
    if dry_run:
        lines, command = preview_training(*arguments)
        print(*lines, sep="\n", file=sys.stderr)
        print(command)
        return
    # A training must not end because the reader of its output has (`| head`).
    continue_without_output()
    raise typer.Exit(train_in_this_process(*arguments))

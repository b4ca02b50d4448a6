"""`ortlaunch train`: in processes of its own, which outlive the caller, or in this process.

Errors of the recipe, the hosts and the run folder are raised in the caller, before anything
starts. Later errors are in the run folder, and `Run.wait` raises them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortlaunch.api.detached import (
    last_output_lines,
    launch_options_as_command_arguments,
    start_detached_and_await_job_file_or_raise,
)
from ortlaunch.api.inputs import (
    LoadedRecipe,
    RecipeSource,
    load_recipe_with_path_and_overrides,
)
from ortlaunch.api.plan import resolve_loaded_recipe
from ortlaunch.api.runs import Run
from ortlaunch.base.errors import InputError, PlanError, RunError
from ortlaunch.base.forked_process import ForkedProcess
from ortlaunch.launch.prepared import PreparedProcess
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe import dump_recipe_yaml, load_recipe
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun, load_and_resolve_recipe
from ortlaunch.resolve.resume import AUTOMATIC_RESUME, ResumeOptions
from ortlaunch.resolve.shipped import recipe_path_or_shipped_recipe
from ortlaunch.run import preview
from ortlaunch.run.preparation import (
    create_run_folder_or_numbered_one,
    requested_or_absent_folder_for_checks,
    requested_or_proposed_run_folder,
)
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.started_runs.registry import newest_training_of_recipe_or_refuse


def train(
    source: RecipeSource,
    *assignments: str,
    run_dir: str | os.PathLike[str] | None = None,
    wait: bool = True,
    progress: bool = False,
    options: LaunchOptions | None = None,
    resume: str | ResumeOptions = AUTOMATIC_RESUME,
    **overrides: object,
) -> Run:
    """Train a recipe, as `ortlaunch train` does, in processes that outlive the caller.

    Args:
        source, assignments, overrides: as in `load`.
        run_dir: the run folder; None: a new one in `runs`. An existing one is continued.
        wait: whether to wait for the end. An interrupt ends the waiting, not the run.
        progress: whether to show a bar of tqdm while waiting.
        options: launcher, hosts and ranks.
        resume: `auto`, `never`, a step, or a folder; as --resume. ResumeOptions has --allow, too.

    Returns:
        The run; its folder has everything, and `output.txt` what the command printed.

    Raises:
        InputError: recipe, hosts or run folder are wrong. Nothing was started.
        RunError: the run failed, and `wait` is true; the message is its verdict.
    """
    resume_options = resume if isinstance(resume, ResumeOptions) else ResumeOptions(str(resume))
    loaded = load_recipe_with_path_and_overrides(source, assignments, overrides)
    requested_folder = None if run_dir is None else Path(run_dir)
    run, process = check_and_start_detached_run_in_new_folder(
        loaded, options or LaunchOptions(), requested_folder, resume_options
    )
    if wait:
        run.wait(progress)
        # A command that ended before it took over an existing run has left that run's record.
        if (status := process.wait()) not in (0, EXIT_SAVED):
            raise RunError(last_output_lines(RunDir(run.path)), status)
    return run


def folder_to_continue_or_refuse(recipe_path: Path, requested_folder: Path | None) -> Path:
    """Return the run folder of --continue: the newest run of a recipe, or of a shipped recipe.

    Raises:
        InputError: there is no such run, or --run-dir names a folder.
    """
    if requested_folder is not None:
        raise InputError(
            f"--continue --run-dir {requested_folder}: --continue is for the newest run of the recipe; give one of "
            "them (--run-dir continues that folder's run)"
        )
    return newest_training_of_recipe_or_refuse(recipe_path_or_shipped_recipe(recipe_path))


def train_in_this_process(
    recipe_path: Path,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
    requested_folder: Path | None,
    resume_options: ResumeOptions,
) -> int:
    """Run the ranks as children of this process, which prints, and return the exit status.

    Args:
        recipe_path: its path, or the name of a shipped one.
        overrides: `key.path=value` of the command line.
        launch_options: launcher, hosts and ranks.
        requested_folder: the run folder; None: a new one.
        resume_options: values of --resume and --allow.
    """
    # It is slow to import.
    from ortlaunch.run import control

    return control.lock_folder_and_run_training(
        load_and_resolve_recipe(recipe_path, overrides, launch_options, os.environ),
        requested_folder,
        resume_options,
    )


def default_compared_step_count(recipe_argument: Path, overrides: Sequence[str]) -> int:
    """Return the steps that `ortlaunch parity` compares where none are given.

    Raises:
        InputError: the recipe is wrong.
    """
    recipe_path = recipe_path_or_shipped_recipe(recipe_argument)
    # One step, which every recipe may compare.
    recipe = load_recipe(recipe_path, [*overrides, "engine.parity_steps=1"]).recipe
    # Rank 0 has the whole model before the first step alone.
    return 1 if recipe.parallel else 3


def preview_training(
    recipe_path: Path,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
    requested_folder: Path | None,
    resume_options: ResumeOptions,
) -> tuple[list[str], str]:
    """Return the lines before a start, and the command; arguments of `train_in_this_process`."""
    resolved_run = load_and_resolve_recipe(recipe_path, overrides, launch_options, os.environ)
    run = requested_or_proposed_run_folder(requested_folder, resolved_run, os.environ)
    return preview.preview_lines_and_launch_command(resolved_run, run, resume_options)


def check_and_start_detached_run_in_new_folder(
    loaded: LoadedRecipe,
    launch_options: LaunchOptions,
    requested_folder: Path | None,
    resume_options: ResumeOptions = AUTOMATIC_RESUME,
    environ_if_ends_with_caller: Mapping[str, str] | None = None,
    prepared_process: PreparedProcess | None = None,
) -> tuple[Run, subprocess.Popen[bytes] | ForkedProcess]:
    """Start a run; errors are those of `train`.

    Args:
        environ_if_ends_with_caller: variables beside those of this process, of a trial of a sweep; such a run also ends
            with this process.
        prepared_process: forks the command if it can.

    Returns:
        The run, and the process of its command.
    """
    resolved_run = resolve_loaded_recipe(
        loaded, launch_options, {**os.environ, **(environ_if_ends_with_caller or {})}
    )
    if resolved_run.world.enclosing_rank is not None:
        raise PlanError(
            "this process is a rank of a launcher, whose ranks train: use `ortlaunch train` there"
        )
    folder = requested_or_proposed_run_folder(requested_folder, resolved_run, os.environ)
    # The command prints the lines of these checks again, to output.txt.
    with contextlib.redirect_stdout(None):
        preview.preview_lines_and_launch_command(
            resolved_run,
            requested_or_absent_folder_for_checks(folder, requested_folder),
            resume_options,
        )
    folder = create_run_folder_or_numbered_one(folder) if requested_folder is None else folder
    recipe, variables = _recipe_arguments_and_environ_writing_if_no_file(
        loaded, resolved_run, folder
    )
    arguments = [
        "train",
        *recipe,
        f"--run-dir={folder}",
        *launch_options_as_command_arguments(resolved_run.command.options),
        f"--resume={resume_options.choice}",
        *(f"--allow={name}" for name in resume_options.allow),
    ]
    measures_engine = resolved_run.recipe_file.recipe.engine.name == "auto"
    extra_environ = {**variables, **(environ_if_ends_with_caller or {})}
    if prepared_process is not None:
        recipe_of_run = resolved_run.recipe_file.recipe
        prepared_process.start_unless_running(
            {**os.environ, **extra_environ, **recipe_of_run.launch.env},
            dump_recipe_yaml(recipe_of_run),
            resolved_run.plan,
        )
    process = start_detached_and_await_job_file_or_raise(
        arguments,
        folder,
        extra_environ,
        measures_engine,
        ends_with_caller=environ_if_ends_with_caller is not None,
        prepared_process=prepared_process,
    )
    return Run(folder.path), process


def _recipe_arguments_and_environ_writing_if_no_file(
    loaded: LoadedRecipe, resolved_run: ResolvedRun, run: RunDir
) -> tuple[list[str], dict[str, str]]:
    """Return the recipe's words of the command, and variables of its environment."""
    if loaded.is_file:
        return [str(loaded.given_path), *loaded.overrides], {}
    # As for a queued run: the folder has the recipe, a variable the folder of the modules.
    write_text_atomically(run.submitted, dump_recipe_yaml(resolved_run.recipe_file.recipe))
    return [str(run.submitted)], {
        MODULES_VARIABLE: os.path.abspath(resolved_run.command.modules_folder)
    }

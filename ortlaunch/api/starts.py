"""Start a run in processes of its own, which outlive the caller.

Errors of the recipe, the hosts and the run folder are raised in the caller, before anything
starts. Later errors are in the run folder, and `Run.wait` raises them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.api.detached import last_output, option_words, start_detached
from ortlaunch.api.inputs import LoadedRecipe, Source, assignments_of, read
from ortlaunch.api.plans import resolved
from ortlaunch.api.runs import Run
from ortlaunch.errors import PlanError, RunError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe import to_yaml
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun
from ortlaunch.resolve.resume import AUTOMATIC, ResumeOptions
from ortlaunch.run import preview
from ortlaunch.run.preparation import (
    claim_run_folder,
    folder_for_checks,
    new_or_requested_run_folder,
)
from ortlaunch.run_folder.folder import RunDir, write_text_atomically


def train(
    source: Source,
    *assignments: str,
    run_dir: str | os.PathLike[str] | None = None,
    wait: bool = True,
    progress: bool = False,
    options: LaunchOptions | None = None,
    resume: str | ResumeOptions = AUTOMATIC,
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
    chosen = resume if isinstance(resume, ResumeOptions) else ResumeOptions(str(resume))
    loaded = read(source, assignments, overrides)
    place = None if run_dir is None else Path(run_dir)
    run, process = started(loaded, options or LaunchOptions(), place, chosen)
    if wait:
        run.wait(progress)
        # A command that ended before it took over an existing run has left that run's record.
        if process.wait() not in (0, EXIT_SAVED):
            raise RunError(last_output(RunDir(run.path)), process.returncode)
    return run


def started(
    loaded: LoadedRecipe,
    options: LaunchOptions,
    run_dir: Path | None,
    resume: ResumeOptions = AUTOMATIC,
    environ: Mapping[str, str] | None = None,
) -> tuple[Run, subprocess.Popen[bytes]]:
    """Start a run; errors are those of `train`.

    Args:
        environ: variables beside those of this process, of a trial of a sweep; such a run also ends
            with this process.

    Returns:
        The run, and the process of its command.
    """
    found = resolved(loaded, options, {**os.environ, **(environ or {})})
    if found.world.inside is not None:
        raise PlanError(
            "this process is a rank of a launcher, whose ranks train: use `ortlaunch train` there"
        )
    folder = new_or_requested_run_folder(run_dir, found, os.environ)
    # The command prints the lines of these checks again, to output.txt.
    with contextlib.redirect_stdout(None):
        preview.preview_start(found, folder_for_checks(folder, run_dir), resume)
    folder = claim_run_folder(folder) if run_dir is None else folder
    recipe, variables = _recipe_words(loaded, found, folder)
    words = ["train", *recipe, f"--run-dir={folder}", *option_words(found.command.options)]
    words += [f"--resume={resume.choice}", *(f"--allow={name}" for name in resume.allow)]
    measures = found.file.recipe.engine.name == "auto"
    process = start_detached(
        words, folder, {**variables, **(environ or {})}, measures, with_caller=environ is not None
    )
    return Run(folder.path), process


def _recipe_words(
    loaded: LoadedRecipe, found: ResolvedRun, run: RunDir
) -> tuple[list[str], dict[str, str]]:
    """Return the recipe's words of the command, and variables of its environment."""
    if loaded.is_file:
        return [str(loaded.given), *loaded.overrides], {}
    # As for a queued run: the folder has the recipe, a variable the folder of the modules.
    write_text_atomically(run.submitted, to_yaml(found.file.recipe))
    return [str(run.submitted)], {MODULES_VARIABLE: os.path.abspath(found.command.modules)}


def submit(
    source: Source,
    *assignments: str,
    scheduler: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    **overrides: object,
) -> Run:
    """Queue a recipe in a scheduler, as `ortlaunch submit` does; `status().job.id` is the job's id.

    Args:
        source, assignments, overrides: as in `load`.
        scheduler: `slurm`, `kubernetes` or `azureml`; None: the recipe's.
        run_dir: the run folder; None: a new one in `runs`.

    Raises:
        InputError: the recipe or the run folder is wrong, or the scheduler is not installed.
        LaunchError: the scheduler refused the job.
    """
    from ortlaunch.api.submission import Submission

    place = None if run_dir is None else Path(run_dir)
    words = (*assignments, *assignments_of(overrides))
    submission = Submission.of(source, words, scheduler, place)
    return Run(submission.send().run.path)

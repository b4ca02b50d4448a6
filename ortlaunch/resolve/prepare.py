"""The run folder: a check of its contents, and the ranks' files. Starts nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from ortlaunch import recipe
from ortlaunch.cache import reason_others_can_write
from ortlaunch.errors import InputError, PlanError, RecipeError
from ortlaunch.launch import LaunchRequest, load_backend
from ortlaunch.launch.attempts import move_logs_and_errors_to_attempt
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import Plan
from ortlaunch.launchers import launcher_row
from ortlaunch.output import print_lines
from ortlaunch.planning.describe import describe
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.ort_variables import variables_in
from ortlaunch.recipe.rules.resume_rules import leaves
from ortlaunch.resolve import provenance, resume
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.engine_report import Choice
from ortlaunch.run_folder.folder import (
    RunDir,
    is_temporary_file,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.records import as_json


def check_launcher(world: World, run: RunDir) -> None:
    """Check that the launcher can start ranks on these hosts, with this folder.

    Raises:
        PlanError, MissingDependency: it cannot start them.
    """
    # The user's own launcher has started the ranks already.
    if launcher_row(world.launcher).is_ours:
        load_backend(world.launcher).check(world.nodes, run)


def request_of(plan: Plan, run: RunDir) -> LaunchRequest:
    """Return the request that starts the ranks, without side effects."""
    if not plan.started_by.is_ours:
        return LaunchRequest((*plan.argv, str(run)), plan.env)
    return load_backend(plan.launcher).request(plan, run)


def write_run(
    run: RunDir, chosen: Recipe, plan: Plan, choice: Choice | None = None, again: bool = False
) -> LaunchRequest:
    """Write the files for the ranks, set aside those of an earlier start, and return the request.

    Args:
        choice: the decision for `engine.name: auto`, if that was requested.
        again: whether this command starts the ranks again. Requests in the folder are then kept,
            for they came meanwhile and are meant for the new ranks.
    """
    request = request_of(plan, run)
    records = {} if choice is None else {run.choice: as_json(choice)}
    if plan.deepspeed is not None:
        records[run.deepspeed] = plan.deepspeed
    variables = {**variables_in(os.environ), **variables_in(chosen.launch.env)}
    records[run.environment] = {**provenance.environment(), "ortmodule_variables": variables}
    for path, text in {run.recipe: recipe.to_yaml(chosen), run.plan: plan.to_json()}.items():
        write_text_atomically(path, text)
    for path, record in records.items():
        write_json_atomically(path, record)
    # The time of this file marks the start: older logs and checkpoints are of an earlier start.
    write_text_atomically(run.request, f"{request}\n")
    # Records of the earlier start would be taken for those of this one, and the entries of its
    # ranks in the store for those of the new ranks.
    move_logs_and_errors_to_attempt(run)
    killed = filter(is_temporary_file, run.path.iterdir())
    left = (
        *(() if again else run.requests.glob("*")),
        *killed,
        run.stopped,
        run.ended_ranks,
        run.trial,
        run.launcher_error,
        run.store,
        *run.rendezvous.glob("*"),
    )
    for old in (*left, *(() if choice is not None else (run.choice,))):
        old.unlink(missing_ok=True)
    return request


def prepare(
    resolved: ResolvedRun,
    run: RunDir,
    lines: Iterable[str] = (),
    begun: resume.Beginning | None = None,
) -> LaunchRequest:
    """Write the plan and the other files of the run folder; return the request to the launcher.

    Args:
        lines: printed first.
        begun: the beginning of the run, which is recorded; the plan is printed. None: the same
            command starts the ranks again.
    """
    if begun is not None:
        resume.apply(run, resolved.command, begun)
    request = write_run(run, resolved.file.recipe, resolved.plan, resolved.choice, begun is None)
    if begun is not None:
        shown = describe(resolved.plan, resolved.file.recipe)
        lines = [*lines, *resolved.notes, shown, f"run folder: {run}"]
        if why := reason_others_can_write(run.path):
            lines.append(
                f"run folder: {why}: users who can write there can run code as this user "
                "while the ranks start (docs/trust.md)"
            )
    print_lines(lines)
    return request


def earlier(run: RunDir, resolved: ResolvedRun) -> Recipe | None:
    """Return the recipe of an earlier start in this folder; None if there was none.

    Raises:
        RecipeError: it is not valid any more, and no checkpoint records another.
    """
    if not run.recipe.exists():
        return None
    try:
        return recipe.load(run.recipe).recipe
    except RecipeError as error:
        # The run can continue if a checkpoint has a record of its own to compare with.
        saved = run.complete_checkpoints()
        if not saved or origin.read_checkpoint_origin(saved[-1][1]) is None:
            raise
        compared = f"{saved[-1][1]} has a recipe of its own, which is compared"
        print(f"{error}\n{run.recipe} is replaced by the recipe given: {compared}")
        return resolved.file.recipe


def check_folder(run: RunDir, before: Recipe | None, resolved: ResolvedRun) -> list[str]:
    """Check the contents of the run folder; one of an earlier run of this recipe is continued.

    Args:
        before: the recipe of the earlier start.

    Returns:
        The line on a run that is continued, or none.

    Raises:
        PlanError: the folder has other contents, or is none.
    """
    if run.path.exists() and not run.path.is_dir():
        raise PlanError(f"--run-dir {run}: is a file, not a folder; give a folder")
    if run.path.is_symlink() and not run.path.exists():
        raise PlanError(
            f"--run-dir {run}: links to {os.readlink(run.path)}, which does not exist; "
            "create that folder"
        )
    if run.path.exists() and not _is_of_a_run(run):
        raise PlanError(f"--run-dir {run}: is neither empty nor a run folder; give a new one")
    if before is None:
        return []
    if resolved.traits.compares and run.complete_checkpoints():
        raise PlanError(
            f"--run-dir {run}: contains the checkpoints of a training, whose records would be "
            "overwritten; give a new one"
        )
    return [f"continuing {run}"]


def _is_of_a_run(run: RunDir) -> bool:
    """Return whether a run, or a start of one that was cut short, has written the folder.

    A person's files beside those of a run do not matter.
    """
    # Files of other programs may have the names of these records.
    with contextlib.suppress(InputError):
        if JobRecord.read(run) is not None:
            return True
    with contextlib.suppress(InputError, FileNotFoundError):
        return run.submitted.exists() or bool(Plan.read(run.plan))
    # A run writes its recipe after one of these records, so that a recipe alone is a person's.
    started = run.has_only_own_files() and not run.recipe.exists()
    return started or bool(run.complete_checkpoints())


def differences(before: object, after: object) -> Iterator[str]:
    """Return `key.path: old -> new` for every leaf that differs."""
    return (f"{path}: {old!r} -> {new!r}" for path, old, new in leaves(before, after))

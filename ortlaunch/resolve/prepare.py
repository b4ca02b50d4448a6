"""The run folder: a check of its contents, and the ranks' files. Starts nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from ortlaunch import recipe
from ortlaunch.base.cache import reason_others_can_write_or_empty
from ortlaunch.base.errors import InputError, PlanError, RecipeError
from ortlaunch.base.output import print_lines
from ortlaunch.launch import LaunchRequest, load_backend
from ortlaunch.launch.attempts import move_logs_to_new_attempt_and_return_number_or_0
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.ort_variables import variables_in
from ortlaunch.recipe.rules.resume_rules import changed_leaves
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
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.tables.launchers import launcher_row


def require_launcher_can_start_hosts(world: World, run: RunDir) -> None:
    """Check that the launcher can start ranks on these hosts, with this folder.

    Raises:
        PlanError, MissingDependency: it cannot start them.
    """
    # The user's own launcher has started the ranks already.
    if launcher_row(world.launcher).is_ours:
        load_backend(world.launcher).require_launchable_hosts(world.nodes, run)


def launch_request(plan: Plan, run: RunDir) -> LaunchRequest:
    """Return the request that starts the ranks, without side effects."""
    if not plan.started_by.is_ours:
        return LaunchRequest((*plan.argv, str(run)), plan.env)
    return load_backend(plan.launcher).launch_request_of_plan(plan, run)


def write_run_files_and_clear_earlier_start(
    run: RunDir,
    chosen_recipe: Recipe,
    plan: Plan,
    engine_choice: Choice | None = None,
    is_restart: bool = False,
) -> LaunchRequest:
    """Write the files for the ranks, set aside those of an earlier start, and return the request.

    Args:
        engine_choice: the decision for `engine.name: auto`, if that was requested.
        is_restart: whether this command starts the ranks again. Requests in the folder are then kept,
            for they came meanwhile and are meant for the new ranks.
    """
    request = launch_request(plan, run)
    records = {} if engine_choice is None else {run.choice: json_values_of_record(engine_choice)}
    if plan.deepspeed is not None:
        records[run.deepspeed] = plan.deepspeed
    ort_variables = {**variables_in(os.environ), **variables_in(chosen_recipe.launch.env)}
    records[run.environment] = {
        **provenance.package_and_machine_versions_record(),
        "ortmodule_variables": ort_variables,
    }
    for path, text in {
        run.recipe: recipe.dump_recipe_yaml(chosen_recipe),
        run.plan: plan.to_json(),
    }.items():
        write_text_atomically(path, text)
    for path, record in records.items():
        write_json_atomically(path, record)
    # The time of this file marks the start: older logs and checkpoints are of an earlier start.
    write_text_atomically(run.request, f"{request}\n")
    # Records of the earlier start would be taken for those of this one, and the entries of its
    # ranks in the store for those of the new ranks.
    move_logs_to_new_attempt_and_return_number_or_0(run)
    temporary_files = filter(is_temporary_file, run.path.iterdir())
    leftover_files = (
        *(() if is_restart else run.requests.glob("*")),
        *temporary_files,
        run.stopped,
        run.ended_ranks,
        run.trial,
        run.launcher_error,
        run.store,
        *run.rendezvous.glob("*"),
    )
    for leftover_file in (*leftover_files, *(() if engine_choice is not None else (run.choice,))):
        leftover_file.unlink(missing_ok=True)
    return request


def set_aside_and_write_run_files_and_print_plan_unless_restart(
    resolved_run: ResolvedRun,
    run: RunDir,
    first_lines: Iterable[str] = (),
    run_beginning: resume.RunBeginning | None = None,
) -> LaunchRequest:
    """Write the plan and the other files of the run folder; return the request to the launcher.

    Args:
        first_lines: printed first.
        run_beginning: the beginning of the run, which is recorded; the plan is printed. None: the same
            command starts the ranks again.
    """
    if run_beginning is not None:
        resume.set_files_aside_and_record_beginning(run, resolved_run.command, run_beginning)
    request = write_run_files_and_clear_earlier_start(
        run,
        resolved_run.recipe_file.recipe,
        resolved_run.plan,
        resolved_run.engine_choice,
        run_beginning is None,
    )
    if run_beginning is not None:
        plan_text = plan_description_text(resolved_run.plan, resolved_run.recipe_file.recipe)
        first_lines = [*first_lines, *resolved_run.notes, plan_text, f"run folder: {run}"]
        if reason := reason_others_can_write_or_empty(run.path):
            first_lines.append(
                f"run folder: {reason}: users who can write there can run code as this user "
                "while the ranks start (`ortlaunch docs trust`)"
            )
    print_lines(first_lines)
    return request


def read_earlier_or_else_given_recipe_or_none(
    run: RunDir, resolved_run: ResolvedRun
) -> Recipe | None:
    """Return the recipe of an earlier start in this folder; None if there was none.

    Raises:
        RecipeError: it is not valid any more, and no checkpoint records another.
    """
    if not run.recipe.exists():
        return None
    try:
        return recipe.load_recipe(run.recipe).recipe
    except RecipeError as error:
        # The run can continue if a checkpoint has a record of its own to compare with.
        newest_checkpoint = run.newest_complete_checkpoint()
        if (
            newest_checkpoint is None
            or origin.read_checkpoint_origin_or_none(newest_checkpoint[1]) is None
        ):
            raise
        print(
            f"{error}\n{run.recipe} is replaced by the recipe given: {newest_checkpoint[1]} has a "
            "recipe of its own, which is compared"
        )
        return resolved_run.recipe_file.recipe


def refuse_foreign_folder_or_return_continuing_lines(
    run: RunDir, earlier_recipe: Recipe | None, resolved_run: ResolvedRun
) -> list[str]:
    """Check the contents of the run folder; one of an earlier run of this recipe is continued.

    Args:
        earlier_recipe: the recipe of the earlier start.

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
    if run.path.exists() and not _has_run_or_interrupted_start(run):
        raise PlanError(f"--run-dir {run}: is neither empty nor a run folder; give a new one")
    if earlier_recipe is None:
        return []
    if resolved_run.traits.compares and run.complete_checkpoints():
        raise PlanError(
            f"--run-dir {run}: contains the checkpoints of a training, whose records would be "
            "overwritten; give a new one"
        )
    return [f"continuing {run}"]


def _has_run_or_interrupted_start(run: RunDir) -> bool:
    """Return whether a run, or a start of one that was cut short, has written the folder.

    A person's files beside those of a run do not matter.
    """
    # Files of other programs may have the names of these records.
    with contextlib.suppress(InputError):
        if JobRecord.read_or_none_refusing_damaged(run) is not None:
            return True
    with contextlib.suppress(InputError, FileNotFoundError):
        return run.submitted.exists() or bool(Plan.read(run.plan))
    # A run writes its recipe after one of these records, so that a recipe alone is a person's.
    has_started_files = run.has_only_run_files_and_no_checkpoints() and not run.recipe.exists()
    return has_started_files or bool(run.complete_checkpoints())


def difference_texts(old_value: object, new_value: object) -> Iterator[str]:
    """Return `key.path: old -> new` for every leaf that differs."""
    return (
        f"{leaf.path}: {leaf.old_value!r} -> {leaf.new_value!r}"
        for leaf in changed_leaves(old_value, new_value)
    )

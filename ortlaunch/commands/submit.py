"""`ortlaunch submit`: write the run folder and the job, and queue the job. Starts nothing here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe, start
from ortlaunch.errors import PlanError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch.record import JobRecord, current_time_iso
from ortlaunch.other_runs import registry
from ortlaunch.other_runs.status import read_status
from ortlaunch.recipe import inputs
from ortlaunch.resolve.prepare import check_folder, earlier
from ortlaunch.resolve.resolve import MODULES_VARIABLE, ResolvedRun
from ortlaunch.run import micro_size
from ortlaunch.run.preparation import claim_run_folder, folder_for_checks
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.schedulers import SCHEDULERS, QueuedRun, scheduler
from ortlaunch.user_modules import unloadable_factories


def request_of(resolved: ResolvedRun, run: RunDir, name: str) -> LaunchRequest:
    """Return the request for the scheduler, without side effects."""
    chosen = resolved.file.recipe
    _check_restarts(chosen)
    # Paths of this host's Python do not exist in an image.
    container = chosen.submit.container is not None
    command = ("ortlaunch",) if container else start.module_command("ortlaunch.cli")
    concluding = (
        ("python3", "-m", "ortlaunch.other_runs.ended")
        if container
        else start.module_command("ortlaunch.other_runs.ended")
    )
    job = QueuedRun(
        plan=resolved.plan,
        run=RunDir(os.path.abspath(run.path)),
        train=(
            *command,
            "train",
            os.path.abspath(run.submitted),
            "--run-dir",
            os.path.abspath(run.path),
        ),
        conclude=(*concluding, os.path.abspath(run.path), str(chosen.launch.max_restarts)),
        folder=os.getcwd(),
        variables=((MODULES_VARIABLE, os.path.abspath(resolved.command.modules)),),
        options=chosen.submit.model_dump(mode="json"),
        recipe=recipe.to_yaml(chosen),
        restarts=chosen.launch.max_restarts,
        secrets=chosen.launch.forward,
    )
    return scheduler(name).request(job)


def _check_restarts(chosen: recipe.Recipe) -> None:
    """Check that the scheduler can start the run again after a fault, if the recipe requests it.

    Raises:
        PlanError: it cannot.
    """
    submit = chosen.submit
    why = ""
    if submit.scheduler == "azureml":
        why = "Azure ML has no restart of a command job"
    elif (
        submit.scheduler == "kubernetes"
        and submit.kubernetes
        and submit.kubernetes.kind == "trainjob"
    ):
        why = (
            "a TrainJob has no such field; failurePolicy.maxRestarts of the runtime's JobSet "
            "applies"
        )
    elif not submit.requeue:
        why = "the job may not be queued again (submit.requeue: false)"
    if why and chosen.launch.max_restarts:
        raise PlanError(
            f"launch.max_restarts: {chosen.launch.max_restarts} is not supported: {why}; set it "
            "to 0"
        )


def without_effect(resolved: ResolvedRun) -> list[str]:
    """Return a note on fields of `submit` for Slurm that have no effect on another scheduler."""
    chosen = resolved.file.recipe.submit
    # Fields of Slurm alone: neither common ones nor the sections of the other schedulers.
    slurms = set(type(chosen).model_fields) - {"scheduler", "requeue", *SCHEDULERS}
    left = [
        name for name, value in chosen.model_dump(exclude_defaults=True).items() if name in slurms
    ]
    binding = resolved.file.recipe.launch.binding
    if chosen.scheduler == "slurm" and binding in ("core", "numa"):
        return [f"launch.binding: {binding} has no effect: in a job Slurm binds the ranks"]
    if chosen.scheduler == "slurm" or not left:
        return []
    return [f"ignored by {chosen.scheduler}: {', '.join(f'submit.{name}' for name in left)}"]


class Queued(NamedTuple):
    """A job that was queued."""

    number: str
    """The job's id."""
    run: RunDir
    notes: tuple[str, ...]
    """Lines for the user."""


def submit(resolved: ResolvedRun, chosen: Path | None, run: RunDir, name: str) -> Queued:
    """Write the files from which the job begins, and queue the job.

    Raises:
        PlanError: the folder has other contents, or a run in it has not ended.
        RecipeError: a file or function of the user is absent, although the nodes share this disk.
    """
    chosen_recipe = resolved.file.recipe
    missing = [
        *inputs.missing_files(chosen_recipe),
        *inputs.wrong_contents(chosen_recipe),
        *unloadable_factories(chosen_recipe, resolved.command.modules),
    ]
    # An image or another cluster has files that this host need not have.
    if not SCHEDULERS[name].elsewhere and chosen_recipe.submit.container is None:
        resolved.file.require(missing)
    # The ranks of a job of several cannot start the trials that find a size.
    if micro_size.is_search_requested(resolved.file.recipe) and resolved.world.ranks > 1:
        micro_size.refuse_search_in_rank()
    if chosen is not None and run.job.exists() and not read_status(run).state.is_end:
        raise PlanError(
            f"--run-dir {run}: its run has not ended, or is queued; `ortlaunch cancel {run}` "
            "ends it"
        )
    checked = folder_for_checks(run, chosen)
    notes = check_folder(checked, earlier(checked, resolved), resolved)
    run = claim_run_folder(run) if chosen is None else run
    run.logs.mkdir(parents=True, exist_ok=True)
    # Not recipe.yaml: rank 0 writes that file when it prepares the folder.
    write_text_atomically(run.submitted, recipe.to_yaml(resolved.file.recipe))
    number = scheduler(name).submit(request_of(resolved, run, name))
    # After the submission, because the record needs the job's id.
    JobRecord(
        name, number, socket.gethostname(), "", "", current_time_iso(), JobState.PENDING
    ).write(run)
    registry.add(run)
    return Queued(number, run, (*notes, f"run folder: {run}"))

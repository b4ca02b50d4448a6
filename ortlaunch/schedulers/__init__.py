"""Queue the job of a plan with a scheduler; the job's record outlives the command.

`request` has no side effects; `submit`, `state` and `cancel` act. Schedulers are named by string
and imported on use: a new one is a row of SCHEDULERS, a module beside slurm.py and a name in
recipe/fields/submit.py. This package may import the plan's types, launch's Request and JobState,
run_folder and errors, but never the recipe, whose section `submit` it gets as plain values.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from ortlaunch.base.errors import LaunchError, MissingDependency
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder.folder import RunDir


class SchedulerEntry(NamedTuple):
    """The module of a scheduler, and the location of its run folders."""

    module: str
    is_elsewhere: bool
    """Whether the ranks write a run folder of their own, on volumes that this host may not have.
    The run's folder here then has the record of the job alone, and logs come from the scheduler."""


SCHEDULERS = {
    "slurm": SchedulerEntry("ortlaunch.schedulers.slurm", False),
    "kubernetes": SchedulerEntry("ortlaunch.schedulers.kubernetes", True),
    "azureml": SchedulerEntry("ortlaunch.schedulers.azureml", True),
}


@dataclass(frozen=True)
class QueuedRun:
    """The work of a job: its plan, the command of each rank, and its folders."""

    plan: Plan
    # The run folder, as an absolute path.
    run: RunDir
    # The command that becomes a rank.
    train: tuple[str, ...]
    # The command after the ranks; their status is added.
    conclude: tuple[str, ...]
    # The folder in which the command was typed.
    folder: str
    # Variables of the whole job; no secrets.
    variables: tuple[tuple[str, str], ...]
    # The recipe's section `submit`.
    options: Mapping[str, Any]
    # The recipe's text.
    recipe: str = ""
    # `launch.max_restarts`
    restarts: int = 0
    # Names of variables that the ranks need; their values are not stored.
    secrets: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The first line of a script or a manifest, for a person who reads it."""
        return (
            f"# {count_with_noun(self.plan.world_size, 'rank')} of run {self.plan.name}; `ortlaunch "
            f"status {self.run}` shows its state."
        )


class QueueState(NamedTuple):
    """The state of a job in a queue."""

    state: JobState
    state_text: str
    """The scheduler's own name of the state, with its reason."""


class Scheduler(Protocol):
    """A module with these functions; a job is given by its id."""

    def submission_request_of_job(self, job: QueuedRun) -> LaunchRequest:
        """Return the request for a job, without side effects."""

    def write_files_and_queue_job(self, request: LaunchRequest) -> str:
        """Write the request's files, queue the job and return its id.

        Raises:
            MissingDependency: the scheduler's commands are not installed here.
            LaunchError: the scheduler refused, with its own message.
        """

    def queue_state_by_id_of_user_jobs(self) -> dict[str, QueueState]:
        """Return the states of many jobs of this user at once; others are read by `state`."""

    def queue_state_or_none(self, job_id: str) -> QueueState | None:
        """Return the state of the job; None if the scheduler does not know it any more."""

    def request_end_of_job(self, job_id: str) -> None:
        """Request the end of the job.

        Raises:
            LaunchError: the scheduler refused.
        """

    def log_command_of_first_node(self, job_id: str, follows_until_end: bool) -> tuple[str, ...]:
        """Return the command that prints the output of rank 0's node.

        Only for schedulers whose ranks write their folder elsewhere.
        """


def load_scheduler(scheduler_name: str) -> Scheduler:
    """Return the scheduler of this name."""
    return cast(Scheduler, import_module(SCHEDULERS[scheduler_name].module))


def yaml_text_of_manifests(*documents: Mapping[str, object]) -> str:
    """Return manifests as a person would write them: in order, long texts as blocks."""
    # Imported here: Slurm needs no YAML.
    import yaml

    class ManifestDumper(yaml.SafeDumper):
        """A dumper for texts of several lines."""

    def represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
        )

    ManifestDumper.add_representer(str, represent_text)
    # Without a width, YAML would break long commands into several lines.
    return yaml.dump_all(documents, Dumper=ManifestDumper, sort_keys=False, width=1 << 20)


def merge_user_fields_recursively(
    own_fields: Mapping[str, Any], user_fields: Mapping[str, Any]
) -> dict[str, object]:
    """Return an object with a user's fields; lists of named items are merged by name."""
    merged_object = dict(own_fields)
    for key, value in user_fields.items():
        own_value = merged_object.get(key)
        if isinstance(own_value, Mapping) and isinstance(value, Mapping):
            merged_object[key] = merge_user_fields_recursively(own_value, value)
        elif isinstance(own_value, list) and all(
            isinstance(item, Mapping) and "name" in item for item in (*own_value, *value)
        ):
            item_by_name = {named_item["name"]: named_item for named_item in own_value}
            item_by_name |= {
                named_item["name"]: merge_user_fields_recursively(
                    item_by_name.get(named_item["name"], {}), named_item
                )
                for named_item in value
            }
            merged_object[key] = list(item_by_name.values())
        else:
            merged_object[key] = value
    return merged_object


def run_scheduler_command(
    *argv: str,
    missing_command_advice: str,
    limit_seconds: float = 60,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command, and return its result also after a failure.

    Args:
        missing_command_advice: advice for a host without that command.
        limit_seconds: limit of the command's time.
        input_text: the command's standard input; None: this process's own.

    Raises:
        MissingDependency: the command is not installed here.
        LaunchError: it does not answer in time.
    """
    if shutil.which(argv[0]) is None:
        raise MissingDependency(
            f"{argv[0]} not found: {missing_command_advice}; --dry-run prints the job anywhere"
        )
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
            input=input_text,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} did not answer within {limit_seconds:.0f} s; is its server up?"
        ) from None


def scheduler_command_output_or_refuse(
    *argv: str, missing_command_advice: str, input_text: str | None = None
) -> str:
    """Run a scheduler's command that must succeed, and return its output.

    Raises:
        LaunchError: it failed, with its own message.
    """
    completed = run_scheduler_command(
        *argv, missing_command_advice=missing_command_advice, input_text=input_text
    )
    if completed.returncode:
        raise LaunchError(
            f"{' '.join(argv[:3])}: {completed.stderr.strip() or completed.stdout.strip()}"
        )
    return completed.stdout

"""Azure Machine Learning: command jobs with a PyTorch or MPI distribution, through `az ml`.

The id of a job is GROUP/WORKSPACE/NAME. The first two are empty if they are those of
`az configure --defaults`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.schedulers import (
    QueuedRun,
    QueueState,
    merge_user_fields_recursively,
    scheduler_command_output_or_refuse,
    yaml_text_of_manifests,
)

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_HOST_ADVICE = "use a host with `az extension add --name ml`"
# Azure ML's states of a job. CancelRequested still runs.
_STATE_BY_WORD = {
    **dict.fromkeys(
        ("NotStarted", "Starting", "Provisioning", "Preparing", "Queued", "Paused"),
        JobState.PENDING,
    ),
    **dict.fromkeys(
        ("Running", "Finalizing", "CancelRequested", "NotResponding"), JobState.RUNNING
    ),
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Canceled": JobState.CANCELLED,
}


def submission_request_of_job(job: QueuedRun) -> LaunchRequest:
    """Return the az command that prints the job's name, with the description in the run folder."""
    azureml_options = job.options["azureml"]
    manifest_path = str(job.run.manifest)
    workspace_options = _workspace_options(
        azureml_options["resource_group"] or "", azureml_options["workspace"] or ""
    )
    argv = (
        "az",
        "ml",
        "job",
        "create",
        f"--file={manifest_path}",
        *workspace_options,
        "--query=name",
        "--output=tsv",
    )
    return LaunchRequest(argv, files=((manifest_path, job_manifest(job)),))


def job_manifest(job: QueuedRun) -> str:
    """Return the text of the job for `az ml job create` and azure-ai-ml's load_job."""
    user_fields = job.options["azureml"]["job"]
    manifest = merge_user_fields_recursively(azureml_job_mapping(job), user_fields)
    return f"{job.headline}\n{yaml_text_of_manifests(manifest)}"


def azureml_job_mapping(job: QueuedRun) -> dict[str, object]:
    """Return the job; paths of files are those of this machine, and az uploads the files."""
    azureml_options = job.options["azureml"]
    plan = job.plan
    # Else it is the name of an environment that is registered in Azure ML.
    is_image = not azureml_options["environment"].startswith("azureml:")
    return {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": job.run.path.name,
        "experiment_name": azureml_options["experiment"] or plan.name,
        "command": _shell_command_of_ranks(job),
        **(
            {"code": os.path.join(job.folder, azureml_options["code"])}
            if azureml_options["code"]
            else {}
        ),
        "environment": {"image": azureml_options["environment"]}
        if is_image
        else azureml_options["environment"],
        "compute": azureml_options["compute"],
        "resources": {
            "instance_count": len(plan.nodes),
            "shm_size": azureml_options["shared_memory"],
        },
        "distribution": {
            "type": azureml_options["distribution"],
            "process_count_per_instance": plan.nodes[0].slots,
        },
        "environment_variables": dict(_rank_variables(job)),
        "inputs": dict(_recipe_and_data_inputs(job)),
        "outputs": {
            "runs": {"type": "uri_folder", "path": azureml_options["runs"], "mode": "rw_mount"}
        },
    }


def _shell_command_of_ranks(job: QueuedRun) -> str:
    change_folder_text = 'cd "${{inputs.data}}" && ' if job.options["azureml"]["data"] else ""
    run_folder = f'"${{{{outputs.runs}}}}"/{shlex.quote(job.run.path.name)}'
    # Azure ML's shell fills in the job's id, which is unknown before the submission.
    job_variable = f"{JOB_VARIABLE}=azureml:{_group_and_workspace(job)}/$AZUREML_RUN_ID"
    train_command = (
        f'{change_folder_text}ortlaunch train "${{{{inputs.recipe}}}}" --run-dir {run_folder}'
    )
    return f'export ORTLAUNCH_MODULES="$PWD" {job_variable} && {train_command}'


def _rank_variables(job: QueuedRun) -> Iterator[tuple[str, str]]:
    """Yield the only variable of torchrun that Azure ML's PyTorch distribution does not set."""
    if job.options["azureml"]["distribution"] == "pytorch":
        yield "LOCAL_WORLD_SIZE", str(job.plan.nodes[0].slots)


def _recipe_and_data_inputs(job: QueuedRun) -> Iterator[tuple[str, dict[str, str]]]:
    yield "recipe", {"type": "uri_file", "path": str(job.run.submitted), "mode": "ro_mount"}
    if job.options["azureml"]["data"]:
        yield (
            "data",
            {"type": "uri_folder", "path": job.options["azureml"]["data"], "mode": "ro_mount"},
        )


def _group_and_workspace(job: QueuedRun) -> str:
    azureml_options = job.options["azureml"]
    return f"{azureml_options['resource_group'] or ''}/{azureml_options['workspace'] or ''}"


def _workspace_options(resource_group: str, workspace: str) -> tuple[str, ...]:
    option_values = (("--resource-group", resource_group), ("--workspace-name", workspace))
    return tuple(f"{name}={value}" for name, value in option_values if value)


def _job_options(job_id: str) -> tuple[str, ...]:
    resource_group, workspace, job_name = job_id.split("/")
    return (f"--name={job_name}", *_workspace_options(resource_group, workspace))


def write_files_and_queue_job(request: LaunchRequest) -> str:
    """Write the description, create the job and return its id."""
    request.write_files()
    # The id has the group and the workspace of the request; they are empty if az has defaults.
    option_values = dict(word.split("=", 1) for word in request.argv if "=" in word)
    job_name = scheduler_command_output_or_refuse(
        *request.argv, missing_command_advice=_HOST_ADVICE
    ).strip()
    return f"{option_values.get('--resource-group', '')}/{option_values.get('--workspace-name', '')}/{job_name}"


def queue_state_by_id_of_user_jobs() -> dict[str, QueueState]:
    """Return no states: each job is asked for by its name."""
    return {}


def queue_state_or_none(job_id: str) -> QueueState | None:
    """Return the state in the workspace; an unknown one counts as running."""
    state_word = scheduler_command_output_or_refuse(
        "az",
        "ml",
        "job",
        "show",
        *_job_options(job_id),
        "--query=status",
        "--output=tsv",
        missing_command_advice=_HOST_ADVICE,
    ).strip()
    return QueueState(_STATE_BY_WORD.get(state_word, JobState.RUNNING), state_word)


def request_end_of_job(job_id: str) -> None:
    """Request the end of the job."""
    scheduler_command_output_or_refuse(
        "az",
        "ml",
        "job",
        "cancel",
        *_job_options(job_id),
        missing_command_advice=_HOST_ADVICE,
    )


def log_command_of_first_node(job_id: str, follows_until_end: bool) -> tuple[str, ...]:
    """Return the az command, which always follows the logs until the end."""
    return ("az", "ml", "job", "stream", *_job_options(job_id))

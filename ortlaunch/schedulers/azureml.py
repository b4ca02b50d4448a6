"""Azure Machine Learning: command jobs with a PyTorch or MPI distribution, through `az ml`.

The id of a job is GROUP/WORKSPACE/NAME. The first two are empty if they are those of
`az configure --defaults`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ortlaunch.json_types import Json
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.schedulers import QueuedRun, QueueState, command_output, merged, yaml_text

__all__ = ["cancel", "logs", "request", "state", "states", "submit"]

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_WHAT = "use a host with `az extension add --name ml`"
# Azure ML's states of a job. CancelRequested still runs.
_STATES = {
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


def request(job: QueuedRun) -> LaunchRequest:
    """Return the az command that prints the job's name, with the description in the run folder."""
    own = job.options["azureml"]
    path = str(job.run.manifest)
    where = _where(own["resource_group"] or "", own["workspace"] or "")
    argv = ("az", "ml", "job", "create", f"--file={path}", *where, "--query=name", "--output=tsv")
    return LaunchRequest(argv, files=((path, manifest(job)),))


def manifest(job: QueuedRun) -> str:
    """Return the text of the job for `az ml job create` and azure-ai-ml's load_job."""
    return f"{job.headline}\n{yaml_text(merged(description(job), job.options['azureml']['job']))}"


def description(job: QueuedRun) -> Json:
    """Return the job; paths of files are those of this machine, and az uploads the files."""
    own = job.options["azureml"]
    plan = job.plan
    # Else it is the name of an environment that is registered in Azure ML.
    is_image = not own["environment"].startswith("azureml:")
    return {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": job.run.path.name,
        "experiment_name": own["experiment"] or plan.name,
        "command": _command(job),
        **({"code": os.path.join(job.folder, own["code"])} if own["code"] else {}),
        "environment": {"image": own["environment"]} if is_image else own["environment"],
        "compute": own["compute"],
        "resources": {"instance_count": len(plan.nodes), "shm_size": own["shared_memory"]},
        "distribution": {
            "type": own["distribution"],
            "process_count_per_instance": plan.nodes[0].slots,
        },
        "environment_variables": dict(_variables(job)),
        "inputs": dict(_inputs(job)),
        "outputs": {"runs": {"type": "uri_folder", "path": own["runs"], "mode": "rw_mount"}},
    }


def _command(job: QueuedRun) -> str:
    """Return the command of each rank."""
    into = 'cd "${{inputs.data}}" && ' if job.options["azureml"]["data"] else ""
    folder = f'"${{{{outputs.runs}}}}"/{shlex.quote(job.run.path.name)}'
    # Azure ML's shell fills in the job's id, which is unknown before the submission.
    named = f"{JOB_VARIABLE}=azureml:{_place(job)}/$AZUREML_RUN_ID"
    train = f'{into}ortlaunch train "${{{{inputs.recipe}}}}" --run-dir {folder}'
    return f'export ORTLAUNCH_MODULES="$PWD" {named} && {train}'


def _variables(job: QueuedRun) -> Iterator[tuple[str, str]]:
    """Yield the only variable of torchrun that Azure ML's PyTorch distribution does not set."""
    if job.options["azureml"]["distribution"] == "pytorch":
        yield "LOCAL_WORLD_SIZE", str(job.plan.nodes[0].slots)


def _inputs(job: QueuedRun) -> Iterator[tuple[str, dict[str, str]]]:
    yield "recipe", {"type": "uri_file", "path": str(job.run.submitted), "mode": "ro_mount"}
    if job.options["azureml"]["data"]:
        yield (
            "data",
            {"type": "uri_folder", "path": job.options["azureml"]["data"], "mode": "ro_mount"},
        )


def _place(job: QueuedRun) -> str:
    own = job.options["azureml"]
    return f"{own['resource_group'] or ''}/{own['workspace'] or ''}"


def _where(group: str, workspace: str) -> tuple[str, ...]:
    given = (("--resource-group", group), ("--workspace-name", workspace))
    return tuple(f"{name}={value}" for name, value in given if value)


def _named(job: str) -> tuple[str, ...]:
    group, workspace, name = job.split("/")
    return (f"--name={name}", *_where(group, workspace))


def submit(request: LaunchRequest) -> str:
    """Write the description, create the job and return its id."""
    request.write_files()
    # The id has the group and the workspace of the request; they are empty if az has defaults.
    given = dict(word.split("=", 1) for word in request.argv if "=" in word)
    name = command_output(*request.argv, what=_WHAT).strip()
    return f"{given.get('--resource-group', '')}/{given.get('--workspace-name', '')}/{name}"


def states() -> dict[str, QueueState]:
    """Return no states: each job is asked for by its name."""
    return {}


def state(job: str) -> QueueState | None:
    """Return the state in the workspace; an unknown one counts as running."""
    word = command_output(
        "az", "ml", "job", "show", *_named(job), "--query=status", "--output=tsv", what=_WHAT
    ).strip()
    return QueueState(_STATES.get(word, JobState.RUNNING), word)


def cancel(job: str) -> None:
    """Request the end of the job."""
    command_output("az", "ml", "job", "cancel", *_named(job), what=_WHAT)


def logs(job: str, follow: bool) -> tuple[str, ...]:
    """Return the az command, which always follows the logs until the end."""
    return ("az", "ml", "job", "stream", *_named(job))

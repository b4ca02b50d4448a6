"""Kubernetes: an indexed Job, or a TrainJob of Kubeflow Trainer, with a pod for each node.

kubectl sends the job and reads its state. In a pod, `ortlaunch.launch.node` starts the ranks. The
id of a job is NAMESPACE/RESOURCE/NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ortlaunch.base.errors import LaunchError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.rank import EXIT_SAVED, JOB_VARIABLE, NO_FAULT
from ortlaunch.schedulers import (
    QueuedRun,
    QueueState,
    merge_user_fields_recursively,
    scheduler_command_output_or_refuse,
    yaml_text_of_manifests,
)

ManifestObject = dict[str, object]
_RESOURCES = {"job": "job.batch", "trainjob": "trainjob.trainer.kubeflow.org"}
# The container of a TrainJob is named by the runtime.
_CONTAINERS = {"job": "train", "trainjob": "node"}
_RUN_LABEL = "ortlaunch.run"
_FIRST_POD_LABEL = "batch.kubernetes.io/job-completion-index=0"
_RECIPE_FOLDER = "/etc/ortlaunch"
# Seconds from the end of the ranks' grace to SIGKILL.
_CLEAN_UP_SECONDS = 15
# Of the 63 letters of a host's name: the number of the pod is added.
_LONGEST_NAME = 50
# The end of a run folder's name, which keeps shortened names distinct.
_TIME_LENGTH = len("-20260101-000000")
_HOST_ADVICE = "use a host whose kubectl reaches the cluster"


def submission_request_of_job(job: QueuedRun) -> LaunchRequest:
    """Return the kubectl command, with the manifest in the run folder."""
    manifest_path = str(job.run.manifest)
    namespace = job.options["kubernetes"]["namespace"]
    argv = (
        "kubectl",
        "create",
        f"--namespace={namespace}",
        f"--filename={manifest_path}",
        "--output=name",
    )
    return LaunchRequest(argv, files=((manifest_path, job_manifest(job)),))


def job_manifest(job: QueuedRun) -> str:
    """Return the text of all objects: the recipe, the name of the first pod's host, and the job."""
    return f"{job.headline}\n{yaml_text_of_manifests(*manifest_objects_of_job(job))}"


def manifest_objects_of_job(job: QueuedRun) -> list[ManifestObject]:
    """Return the objects of the manifest."""
    kubernetes_options = job.options["kubernetes"]
    first_objects = [
        _labelled_manifest_object("v1", "ConfigMap", job, data={"recipe.yaml": job.recipe})
    ]
    if kubernetes_options["kind"] == "trainjob":
        spec = merge_user_fields_recursively(_trainjob_spec(job), kubernetes_options["job"])
        return [
            *first_objects,
            _labelled_manifest_object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec=spec),
        ]
    # A service without an address: it gives each pod a host name, before the pod is ready.
    if len(job.plan.nodes) > 1:
        service_spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_RUN_LABEL: valid_resource_name_of_run(job)},
        }
        first_objects.append(_labelled_manifest_object("v1", "Service", job, spec=service_spec))
    return [
        *first_objects,
        _labelled_manifest_object(
            "batch/v1",
            "Job",
            job,
            spec=merge_user_fields_recursively(_indexed_job_spec(job), kubernetes_options["job"]),
        ),
    ]


def valid_resource_name_of_run(job: QueuedRun) -> str:
    """Return the run folder's name, changed to a valid host name."""
    name = re.sub("[^a-z0-9]+", "-", job.run.path.name.lower()).strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"
    return (
        name
        if len(name) <= _LONGEST_NAME
        else f"{name[: _LONGEST_NAME - _TIME_LENGTH].rstrip('-')}{name[-_TIME_LENGTH:]}"
    )


def _labelled_manifest_object(
    api_version: str, object_kind: str, job: QueuedRun, **object_fields: Any
) -> ManifestObject:
    kubernetes_options = job.options["kubernetes"]
    object_name = valid_resource_name_of_run(job)
    labels = {"app.kubernetes.io/managed-by": "ortlaunch", **_object_labels(job)}
    # Kueue admits the job when its queue has room.
    if kubernetes_options["queue"] and object_kind in ("Job", "TrainJob"):
        labels["kueue.x-k8s.io/queue-name"] = kubernetes_options["queue"]
    metadata = {
        "name": object_name,
        "namespace": kubernetes_options["namespace"],
        "labels": labels,
        **_annotation_field(job),
    }
    return {"apiVersion": api_version, "kind": object_kind, "metadata": metadata, **object_fields}


def _object_labels(job: QueuedRun) -> dict[str, str]:
    return {**job.options["kubernetes"]["labels"], _RUN_LABEL: valid_resource_name_of_run(job)}


def _annotation_field(job: QueuedRun) -> ManifestObject:
    annotations = job.options["kubernetes"]["annotations"]
    return {"annotations": dict(annotations)} if annotations else {}


def _indexed_job_spec(job: QueuedRun) -> ManifestObject:
    node_count = len(job.plan.nodes)
    pod_spec = {**_pod_spec_without_container(job), "restartPolicy": "Never"}
    if node_count > 1:
        pod_spec["subdomain"] = valid_resource_name_of_run(job)
    pod_spec["containers"] = [
        {"name": _CONTAINERS["job"], **_container_spec(job), "volumeMounts": _volume_mounts(job)}
    ]
    pod_spec = merge_user_fields_recursively(pod_spec, job.options["kubernetes"]["pod"])
    return {
        "completionMode": "Indexed",
        "completions": node_count,
        "parallelism": node_count,
        "backoffLimit": job.restarts,
        "podFailurePolicy": {"rules": list(_pod_failure_rules(job))},
        "template": {
            "metadata": {"labels": _object_labels(job), **_annotation_field(job)},
            "spec": pod_spec,
        },
    }


def _pod_failure_rules(job: QueuedRun) -> Iterator[ManifestObject]:
    """Yield the rules for failed pods.

    A pod whose ranks have saved, or whose node was removed, is created again. Any other failure
    ends the run. With restarts it counts towards `backoffLimit`, unless another start is useless.
    """
    if job.options["requeue"]:
        saved_codes = {
            "containerName": _CONTAINERS["job"],
            "operator": "In",
            "values": [EXIT_SAVED],
        }
        yield {"action": "Ignore", "onExitCodes": saved_codes}
        yield {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    final_codes = (
        {"operator": "In", "values": sorted(NO_FAULT)}
        if job.restarts
        else {"operator": "NotIn", "values": [0]}
    )
    yield {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINERS["job"], **final_codes}}


def _trainjob_spec(job: QueuedRun) -> ManifestObject:
    # The runtime has the failure policy; a patch has no field for one.
    kubernetes_options = job.options["kubernetes"]
    container_spec = _container_spec(job)
    working_folder = container_spec.pop("workingDir")
    trainer = {
        "image": container_spec.pop("image"),
        "command": [*_SHELL, working_folder],
        "args": container_spec.pop("command"),
        "numNodes": len(job.plan.nodes),
        "numProcPerNode": job.plan.nodes[0].slots,
        "resourcesPerNode": container_spec.pop("resources"),
        "env": container_spec.pop("env"),
    }
    pod_spec = {
        **_pod_spec_without_container(job),
        "containers": [{"name": _CONTAINERS["trainjob"], "volumeMounts": _volume_mounts(job)}],
    }
    # The schema of Kubeflow Trainer 2.2 has no such field.
    if kubernetes_options["trainer"] == "v2.2":
        del pod_spec["terminationGracePeriodSeconds"]
    template: ManifestObject = {
        "spec": merge_user_fields_recursively(pod_spec, kubernetes_options["pod"])
    }
    if kubernetes_options["labels"] or kubernetes_options["annotations"]:
        template["metadata"] = {
            "labels": dict(kubernetes_options["labels"]),
            **_annotation_field(job),
        }
    replicated_job = {"name": "node", "template": {"spec": {"template": template}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated_job]}}}
    patches = [{"manager": "ortlaunch/submit", "trainingRuntimeSpec": patch}]
    return {
        "runtimeRef": {"name": kubernetes_options["runtime"]},
        "trainer": trainer,
        "runtimePatches": patches,
    }


# A TrainJob has no field for the working folder: the shell changes to it, its argument 0.
_SHELL = ("sh", "-c", 'cd "$0" && exec "$@"')


def _pod_spec_without_container(job: QueuedRun) -> ManifestObject:
    """Return the parts of a pod that both kinds share, without its container."""
    kubernetes_options = job.options["kubernetes"]
    pod_spec: ManifestObject = {
        "terminationGracePeriodSeconds": job.plan.grace_seconds + _CLEAN_UP_SECONDS
    }
    if kubernetes_options["node_selector"]:
        pod_spec["nodeSelector"] = dict(kubernetes_options["node_selector"])
    if kubernetes_options["service_account"]:
        pod_spec["serviceAccountName"] = kubernetes_options["service_account"]
    volume_claims = [
        {"name": f"data-{volume_index}", "persistentVolumeClaim": {"claimName": name}}
        for volume_index, name in enumerate(kubernetes_options["volumes"])
    ]
    # The container runtime's default for /dev/shm is 64 MiB, too little for data loaders and NCCL.
    memory_volume = {
        "name": "shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes_options["shared_memory"]},
    }
    pod_spec["volumes"] = [
        {"name": "recipe", "configMap": {"name": valid_resource_name_of_run(job)}},
        memory_volume,
        *volume_claims,
    ]
    return pod_spec


def _volume_mounts(job: QueuedRun) -> list[ManifestObject]:
    paths = list(job.options["kubernetes"]["volumes"].values())
    claim_mounts = [
        {"name": f"data-{volume_index}", "mountPath": path}
        for volume_index, path in enumerate(paths)
    ]
    recipe_mount = {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True}
    return [recipe_mount, {"name": "shm", "mountPath": "/dev/shm"}, *claim_mounts]


def _container_spec(job: QueuedRun) -> ManifestObject:
    kubernetes_options = job.options["kubernetes"]
    return {
        "image": kubernetes_options["image"],
        "command": list(_command_that_starts_node_ranks(job)),
        "workingDir": kubernetes_options["workdir"],
        "env": list(_container_environment_entries(job)),
        "resources": {"limits": dict(_gpu_cpu_and_memory_limits(job))},
    }


def _command_that_starts_node_ranks(job: QueuedRun) -> tuple[str, ...]:
    # A TrainJob sets the first node's address itself.
    kubernetes_options = job.options["kubernetes"]
    job_name = valid_resource_name_of_run(job)
    plan = job.plan
    master_option = (
        (f"--master={job_name}-0.{job_name}",)
        if kubernetes_options["kind"] == "job" and len(plan.nodes) > 1
        else ()
    )
    node_argv = (
        "python3",
        "-m",
        "ortlaunch.launch.node",
        f"--nodes={len(plan.nodes)}",
        f"--ranks={plan.nodes[0].slots}",
    )
    run_folder = f"{kubernetes_options['runs'].rstrip('/')}/{job.run.path.name}"
    return (
        *node_argv,
        *master_option,
        "--",
        "ortlaunch",
        "train",
        f"{_RECIPE_FOLDER}/recipe.yaml",
        "--run-dir",
        run_folder,
    )


def _container_environment_entries(job: QueuedRun) -> Iterator[ManifestObject]:
    kubernetes_options = job.options["kubernetes"]
    yield {"name": "ORTLAUNCH_MODULES", "value": kubernetes_options["workdir"]}
    yield {"name": JOB_VARIABLE, "value": f"kubernetes:{_job_id(job)}"}
    for secret_name in job.secrets:
        yield {
            "name": secret_name,
            "valueFrom": {
                "secretKeyRef": {"name": kubernetes_options["secret"], "key": secret_name}
            },
        }


def _gpu_cpu_and_memory_limits(job: QueuedRun) -> Iterator[tuple[str, str]]:
    kubernetes_options = job.options["kubernetes"]
    if job.plan.device == "cuda":
        yield kubernetes_options["gpu"], str(job.plan.nodes[0].slots)
    for resource in ("cpu", "memory"):
        if kubernetes_options[resource] is not None:
            yield resource, kubernetes_options[resource]


def _job_id(job: QueuedRun) -> str:
    kubernetes_options = job.options["kubernetes"]
    resource = _RESOURCES[kubernetes_options["kind"]]
    return f"{kubernetes_options['namespace']}/{resource}/{valid_resource_name_of_run(job)}"


def write_files_and_queue_job(request: LaunchRequest) -> str:
    """Write the manifest, create its objects and return the job's id.

    The job owns the other objects: they end with it. If one of them is refused, the job is deleted.
    """
    # Imported here: only a submission reads the manifest again.
    import yaml

    request.write_files()
    *other_objects, job_object = yaml.safe_load_all(request.files[0][1])
    namespace = job_object["metadata"]["namespace"]
    create_argv = ("kubectl", "create", f"--namespace={namespace}", "--filename=-", "--output=json")
    created_object = json.loads(
        scheduler_command_output_or_refuse(
            *create_argv,
            missing_command_advice=_HOST_ADVICE,
            input_text=yaml_text_of_manifests(job_object),
        )
    )
    owner = {
        **{key: job_object[key] for key in ("apiVersion", "kind")},
        **{key: created_object["metadata"][key] for key in ("name", "uid")},
    }
    for other_object in other_objects:
        other_object["metadata"]["ownerReferences"] = [owner]
    job_id = (
        f"{namespace}/{_RESOURCES[job_object['kind'].lower()]}/{created_object['metadata']['name']}"
    )
    try:
        scheduler_command_output_or_refuse(
            *create_argv,
            missing_command_advice=_HOST_ADVICE,
            input_text=yaml_text_of_manifests(*other_objects),
        )
    except LaunchError:
        request_end_of_job(job_id)
        raise
    return job_id


def queue_state_by_id_of_user_jobs() -> dict[str, QueueState]:
    """Return no states: each job is asked for by its name."""
    return {}


def queue_state_or_none(job_id: str) -> QueueState | None:
    """Return the state by the job's conditions, else by its pods; None if the job is unknown."""
    namespace, _, resource = job_id.partition("/")
    text = scheduler_command_output_or_refuse(
        "kubectl",
        "get",
        resource,
        f"--namespace={namespace}",
        "--output=json",
        "--ignore-not-found",
        missing_command_advice=_HOST_ADVICE,
    )
    return queue_state_of_job_object(json.loads(text)) if text.strip() else None


def queue_state_of_job_object(job_object: Mapping[str, Any]) -> QueueState:
    """Return the state of a Job or TrainJob from `kubectl get --output=json`."""
    status = job_object.get("status", {})
    conditions = {
        condition["type"]: condition
        for condition in status.get("conditions", ())
        if condition["status"] == "True"
    }
    for condition_type in ("Complete", "SuccessCriteriaMet"):
        if condition_type in conditions:
            return QueueState(JobState.SUCCEEDED, condition_type)
    for condition_type in ("Failed", "FailureTarget"):
        if condition_type in conditions:
            return _failed_state(_condition_text(condition_type, conditions[condition_type]))
    if "deletionTimestamp" in job_object["metadata"]:
        return QueueState(JobState.RUNNING, "being deleted")
    if "Suspended" in conditions:
        return QueueState(JobState.PENDING, _condition_text("Suspended", conditions["Suspended"]))
    # A Job counts its own pods, a TrainJob has the counts of its Jobs.
    ready_count = int(status.get("ready", 0)) + sum(
        int(condition.get("ready", 0)) for condition in status.get("jobsStatus", ())
    )
    return (
        QueueState(JobState.RUNNING, "pods are ready")
        if ready_count
        else QueueState(JobState.PENDING, "no pod is ready")
    )


def _failed_state(condition_text: str) -> QueueState:
    has_saved_status = re.search(rf"exit code {EXIT_SAVED}\b", condition_text)
    return QueueState(JobState.PREEMPTED if has_saved_status else JobState.FAILED, condition_text)


def _condition_text(condition_type: str, condition: Mapping[str, Any]) -> str:
    reason = ", ".join(condition[name] for name in ("reason", "message") if condition.get(name))
    return f"{condition_type} ({reason})" if reason else condition_type


def request_end_of_job(job_id: str) -> None:
    """Delete the job and its recipe: pods get SIGTERM and their grace to save."""
    namespace, resource, name = job_id.split("/")
    other_resources = (f"configmap/{name}", f"service/{name}")
    options = (
        f"--namespace={namespace}",
        "--cascade=foreground",
        "--wait=false",
        "--ignore-not-found",
    )
    scheduler_command_output_or_refuse(
        "kubectl",
        "delete",
        f"{resource}/{name}",
        *other_resources,
        *options,
        missing_command_advice=_HOST_ADVICE,
    )


def log_command_of_first_node(job_id: str, follows_until_end: bool) -> tuple[str, ...]:
    """Return the command for the first pod's logs: rank 0's output, and errors of its node."""
    namespace, resource, name = job_id.split("/")
    job_kind = next(
        job_kind for job_kind, job_resource in _RESOURCES.items() if job_resource == resource
    )
    pod_selector = (
        f"{_RUN_LABEL}={name}" if job_kind == "job" else f"jobset.sigs.k8s.io/jobset-name={name}"
    )
    argv = (
        "kubectl",
        "logs",
        f"--namespace={namespace}",
        f"--selector={pod_selector},{_FIRST_POD_LABEL}",
        "--tail=-1",
    )
    return (
        *argv,
        f"--container={_CONTAINERS[job_kind]}",
        *(("--follow",) if follows_until_end else ()),
    )

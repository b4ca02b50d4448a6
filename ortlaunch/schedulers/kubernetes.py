"""Kubernetes: an indexed Job, or a TrainJob of Kubeflow Trainer, with a pod for each node.

kubectl sends the job and reads its state. In a pod, `ortlaunch.launch.node` starts the ranks. The
id of a job is NAMESPACE/RESOURCE/NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.rank import EXIT_SAVED, JOB_VARIABLE, NO_FAULT
from ortlaunch.schedulers import QueuedRun, QueueState, command_output, merged, yaml_text

__all__ = ["cancel", "logs", "request", "state", "states", "submit"]

Object = dict[str, object]
_RESOURCES = {"job": "job.batch", "trainjob": "trainjob.trainer.kubeflow.org"}
# The container of a TrainJob is named by the runtime.
_CONTAINERS = {"job": "train", "trainjob": "node"}
_LABEL = "ortlaunch.run"
_INDEX = "batch.kubernetes.io/job-completion-index=0"
_RECIPE_FOLDER = "/etc/ortlaunch"
# Seconds from the end of the ranks' grace to SIGKILL.
_CLEAN_UP_SECONDS = 15
# Of the 63 letters of a host's name: the number of the pod is added.
_LONGEST = 50
# The end of a run folder's name, which keeps shortened names distinct.
_TIME = len("-20260101-000000")
_WHAT = "use a host whose kubectl reaches the cluster"


def request(job: QueuedRun) -> LaunchRequest:
    """Return the kubectl command, with the manifest in the run folder."""
    path = str(job.run.manifest)
    namespace = job.options["kubernetes"]["namespace"]
    argv = ("kubectl", "create", f"--namespace={namespace}", f"--filename={path}", "--output=name")
    return LaunchRequest(argv, files=((path, manifest(job)),))


def manifest(job: QueuedRun) -> str:
    """Return the text of all objects: the recipe, the name of the first pod's host, and the job."""
    return f"{job.headline}\n{yaml_text(*objects(job))}"


def objects(job: QueuedRun) -> list[Object]:
    """Return the objects of the manifest."""
    own = job.options["kubernetes"]
    made = [_object("v1", "ConfigMap", job, data={"recipe.yaml": job.recipe})]
    if own["kind"] == "trainjob":
        spec = merged(_trainjob(job), own["job"])
        return [*made, _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec=spec)]
    # A service without an address: it gives each pod a host name, before the pod is ready.
    if len(job.plan.nodes) > 1:
        names = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: name_of(job)},
        }
        made.append(_object("v1", "Service", job, spec=names))
    return [*made, _object("batch/v1", "Job", job, spec=merged(_job(job), own["job"]))]


def name_of(job: QueuedRun) -> str:
    """Return the run folder's name, changed to a valid host name."""
    name = re.sub("[^a-z0-9]+", "-", job.run.path.name.lower()).strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"
    return (
        name if len(name) <= _LONGEST else f"{name[: _LONGEST - _TIME].rstrip('-')}{name[-_TIME:]}"
    )


def _object(version: str, kind: str, job: QueuedRun, **parts: Any) -> Object:
    own = job.options["kubernetes"]
    name = name_of(job)
    labels = {"app.kubernetes.io/managed-by": "ortlaunch", **_labels(job)}
    # Kueue admits the job when its queue has room.
    if own["queue"] and kind in ("Job", "TrainJob"):
        labels["kueue.x-k8s.io/queue-name"] = own["queue"]
    metadata = {"name": name, "namespace": own["namespace"], "labels": labels, **_notes(job)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def _labels(job: QueuedRun) -> dict[str, str]:
    return {**job.options["kubernetes"]["labels"], _LABEL: name_of(job)}


def _notes(job: QueuedRun) -> Object:
    own = job.options["kubernetes"]["annotations"]
    return {"annotations": dict(own)} if own else {}


def _job(job: QueuedRun) -> Object:
    count = len(job.plan.nodes)
    pod = {**_pod(job), "restartPolicy": "Never"}
    if count > 1:
        pod["subdomain"] = name_of(job)
    pod["containers"] = [
        {"name": _CONTAINERS["job"], **_container(job), "volumeMounts": _mounts(job)}
    ]
    pod = merged(pod, job.options["kubernetes"]["pod"])
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": job.restarts,
        "podFailurePolicy": {"rules": list(_failures(job))},
        "template": {"metadata": {"labels": _labels(job), **_notes(job)}, "spec": pod},
    }


def _failures(job: QueuedRun) -> Iterator[Object]:
    """Yield the rules for failed pods.

    A pod whose ranks have saved, or whose node was removed, is created again. Any other failure
    ends the run. With restarts it counts towards `backoffLimit`, unless another start is useless.
    """
    if job.options["requeue"]:
        codes = {"containerName": _CONTAINERS["job"], "operator": "In", "values": [EXIT_SAVED]}
        yield {"action": "Ignore", "onExitCodes": codes}
        yield {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    final = (
        {"operator": "In", "values": sorted(NO_FAULT)}
        if job.restarts
        else {"operator": "NotIn", "values": [0]}
    )
    yield {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINERS["job"], **final}}


def _trainjob(job: QueuedRun) -> Object:
    """Return the spec of a TrainJob."""
    # The runtime has the failure policy; a patch has no field for one.
    own = job.options["kubernetes"]
    container = _container(job)
    folder = container.pop("workingDir")
    trainer = {
        "image": container.pop("image"),
        "command": [*_SHELL, folder],
        "args": container.pop("command"),
        "numNodes": len(job.plan.nodes),
        "numProcPerNode": job.plan.nodes[0].slots,
        "resourcesPerNode": container.pop("resources"),
        "env": container.pop("env"),
    }
    pod = {
        **_pod(job),
        "containers": [{"name": _CONTAINERS["trainjob"], "volumeMounts": _mounts(job)}],
    }
    # The schema of Kubeflow Trainer 2.2 has no such field.
    if own["trainer"] == "v2.2":
        del pod["terminationGracePeriodSeconds"]
    template: Object = {"spec": merged(pod, own["pod"])}
    if own["labels"] or own["annotations"]:
        template["metadata"] = {"labels": dict(own["labels"]), **_notes(job)}
    nodes = {"name": "node", "template": {"spec": {"template": template}}}
    patch = {"template": {"spec": {"replicatedJobs": [nodes]}}}
    patches = [{"manager": "ortlaunch/submit", "trainingRuntimeSpec": patch}]
    return {"runtimeRef": {"name": own["runtime"]}, "trainer": trainer, "runtimePatches": patches}


# A TrainJob has no field for the working folder: the shell changes to it, its argument 0.
_SHELL = ("sh", "-c", 'cd "$0" && exec "$@"')


def _pod(job: QueuedRun) -> Object:
    """Return the parts of a pod that both kinds share, without its container."""
    own = job.options["kubernetes"]
    pod: Object = {"terminationGracePeriodSeconds": job.plan.grace_seconds + _CLEAN_UP_SECONDS}
    if own["node_selector"]:
        pod["nodeSelector"] = dict(own["node_selector"])
    if own["service_account"]:
        pod["serviceAccountName"] = own["service_account"]
    claims = [
        {"name": f"data-{n}", "persistentVolumeClaim": {"claimName": name}}
        for n, name in enumerate(own["volumes"])
    ]
    # The container runtime's default for /dev/shm is 64 MiB, too little for data loaders and NCCL.
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": own["shared_memory"]}}
    pod["volumes"] = [{"name": "recipe", "configMap": {"name": name_of(job)}}, memory, *claims]
    return pod


def _mounts(job: QueuedRun) -> list[Object]:
    paths = list(job.options["kubernetes"]["volumes"].values())
    claims = [{"name": f"data-{n}", "mountPath": path} for n, path in enumerate(paths)]
    recipe = {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True}
    return [recipe, {"name": "shm", "mountPath": "/dev/shm"}, *claims]


def _container(job: QueuedRun) -> Object:
    own = job.options["kubernetes"]
    return {
        "image": own["image"],
        "command": list(_command(job)),
        "workingDir": own["workdir"],
        "env": list(_variables(job)),
        "resources": {"limits": dict(_limits(job))},
    }


def _command(job: QueuedRun) -> tuple[str, ...]:
    """Return the command that starts a node's ranks."""
    # A TrainJob sets the first node's address itself.
    own = job.options["kubernetes"]
    name = name_of(job)
    plan = job.plan
    master = (f"--master={name}-0.{name}",) if own["kind"] == "job" and len(plan.nodes) > 1 else ()
    node = (
        "python3",
        "-m",
        "ortlaunch.launch.node",
        f"--nodes={len(plan.nodes)}",
        f"--ranks={plan.nodes[0].slots}",
    )
    folder = f"{own['runs'].rstrip('/')}/{job.run.path.name}"
    return (
        *node,
        *master,
        "--",
        "ortlaunch",
        "train",
        f"{_RECIPE_FOLDER}/recipe.yaml",
        "--run-dir",
        folder,
    )


def _variables(job: QueuedRun) -> Iterator[Object]:
    own = job.options["kubernetes"]
    yield {"name": "ORTLAUNCH_MODULES", "value": own["workdir"]}
    yield {"name": JOB_VARIABLE, "value": f"kubernetes:{_id(job)}"}
    for name in job.secrets:
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": own["secret"], "key": name}}}


def _limits(job: QueuedRun) -> Iterator[tuple[str, str]]:
    own = job.options["kubernetes"]
    if job.plan.device == "cuda":
        yield own["gpu"], str(job.plan.nodes[0].slots)
    for name in ("cpu", "memory"):
        if own[name] is not None:
            yield name, own[name]


def _id(job: QueuedRun) -> str:
    own = job.options["kubernetes"]
    return f"{own['namespace']}/{_RESOURCES[own['kind']]}/{name_of(job)}"


def submit(request: LaunchRequest) -> str:
    """Write the manifest, create its objects and return the job's id.

    The job owns the other objects: they end with it. If one of them is refused, the job is deleted.
    """
    # Imported here: only a submission reads the manifest again.
    import yaml

    request.write_files()
    *others, own = yaml.safe_load_all(request.files[0][1])
    namespace = own["metadata"]["namespace"]
    create = ("kubectl", "create", f"--namespace={namespace}", "--filename=-", "--output=json")
    made = json.loads(command_output(*create, what=_WHAT, text=yaml_text(own)))
    owner = {key: own[key] for key in ("apiVersion", "kind")}
    owner |= {key: made["metadata"][key] for key in ("name", "uid")}
    for each in others:
        each["metadata"]["ownerReferences"] = [owner]
    job = f"{namespace}/{_RESOURCES[own['kind'].lower()]}/{made['metadata']['name']}"
    try:
        command_output(*create, what=_WHAT, text=yaml_text(*others))
    except LaunchError:
        cancel(job)
        raise
    return job


def states() -> dict[str, QueueState]:
    """Return no states: each job is asked for by its name."""
    return {}


def state(job: str) -> QueueState | None:
    """Return the state by the job's conditions, else by its pods; None if the job is unknown."""
    namespace, _, resource = job.partition("/")
    text = command_output(
        "kubectl",
        "get",
        resource,
        f"--namespace={namespace}",
        "--output=json",
        "--ignore-not-found",
        what=_WHAT,
    )
    return state_in_object(json.loads(text)) if text.strip() else None


def state_in_object(found: Mapping[str, Any]) -> QueueState:
    """Return the state of a Job or TrainJob from `kubectl get --output=json`."""
    status = found.get("status", {})
    conditions = {
        one["type"]: one for one in status.get("conditions", ()) if one["status"] == "True"
    }
    for kind in ("Complete", "SuccessCriteriaMet"):
        if kind in conditions:
            return QueueState(JobState.SUCCEEDED, kind)
    for kind in ("Failed", "FailureTarget"):
        if kind in conditions:
            return _failed(_words(kind, conditions[kind]))
    if "deletionTimestamp" in found["metadata"]:
        return QueueState(JobState.RUNNING, "being deleted")
    if "Suspended" in conditions:
        return QueueState(JobState.PENDING, _words("Suspended", conditions["Suspended"]))
    # A Job counts its own pods, a TrainJob has the counts of its Jobs.
    ready = int(status.get("ready", 0)) + sum(
        int(one.get("ready", 0)) for one in status.get("jobsStatus", ())
    )
    return (
        QueueState(JobState.RUNNING, "pods are ready")
        if ready
        else QueueState(JobState.PENDING, "no pod is ready")
    )


def _failed(words: str) -> QueueState:
    saved = re.search(rf"exit code {EXIT_SAVED}\b", words)
    return QueueState(JobState.PREEMPTED if saved else JobState.FAILED, words)


def _words(kind: str, condition: Mapping[str, Any]) -> str:
    why = ", ".join(condition[name] for name in ("reason", "message") if condition.get(name))
    return f"{kind} ({why})" if why else kind


def cancel(job: str) -> None:
    """Delete the job and its recipe: pods get SIGTERM and their grace to save."""
    namespace, resource, name = job.split("/")
    rest = (f"configmap/{name}", f"service/{name}")
    options = (
        f"--namespace={namespace}",
        "--cascade=foreground",
        "--wait=false",
        "--ignore-not-found",
    )
    command_output("kubectl", "delete", f"{resource}/{name}", *rest, *options, what=_WHAT)


def logs(job: str, follow: bool) -> tuple[str, ...]:
    """Return the command for the first pod's logs: rank 0's output, and errors of its node."""
    namespace, resource, name = job.split("/")
    kind = next(kind for kind, known in _RESOURCES.items() if known == resource)
    owner = f"{_LABEL}={name}" if kind == "job" else f"jobset.sigs.k8s.io/jobset-name={name}"
    argv = (
        "kubectl",
        "logs",
        f"--namespace={namespace}",
        f"--selector={owner},{_INDEX}",
        "--tail=-1",
    )
    return (*argv, f"--container={_CONTAINERS[kind]}", *(("--follow",) if follow else ()))

"""Tests of submission to Kubernetes and Azure ML: manifests, their schemas, and the jobs' states."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ortlaunch import recipe
from ortlaunch.api.submit import (
    Submission,
    notes_on_ignored_submit_and_binding_fields,
)
from ortlaunch.base.errors import InputError, LaunchError, MissingDependency, PlanError, RecipeError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.schedulers import QueueState, azureml, kubernetes
from ortlaunch.started_runs.cancel import cancel_run_and_wait_for_its_end
from ortlaunch.started_runs.logs import iterate_rank_output_text
from ortlaunch.started_runs.status import read_status
from tests.control.typed import Run

pytestmark = pytest.mark.usefixtures("workbench")
# Manifests that are compared as a whole.
GOLDEN = Path(__file__).with_name("jobs")
# Never created: only its name is used.
RUN = RunDir("/runs/x-20260101-000000")
RECIPES = {"llama2-7b": "llama2-7b/pretrain", "bert-large": "bert-large/phase1"}
KINDS = ("job", "trainjob", "azureml")
CLAIM = "runs: /data/runs, volumes: {training: /data}"
PODS = f"submit.kubernetes={{image: repo/train:1, {CLAIM}, secret: keys, queue: research"
AZURE = (
    "submit.azureml={compute: azureml:gpus, environment: azureml:ortlaunch@latest, "
    "data: azureml:wiki@latest}"
)
WORLD = ("launch.nodes=4", "launch.processes_per_node=8", "launch.device=cuda")
# The shell of the user: its secret must not reach a manifest.
SECRET = {"PATH": "/bin", "WANDB_API_KEY": "s3cret"}


def resolved(name: str, kind: str, *overrides: str) -> ResolvedRun:
    """Resolve a shipped recipe for four nodes of eight GPUs."""
    pods = (
        f"{PODS}, kind: {kind}}}",
        "launch.forward=[WANDB_API_KEY]",
        "submit.scheduler=kubernetes",
    )
    chosen = (AZURE, "submit.scheduler=azureml") if kind == "azureml" else pods
    options = LaunchOptions(planned_only=True, declared=True)
    return load_and_resolve_recipe(
        Path(RECIPES[name]), (*WORLD, *chosen, *overrides), options, SECRET
    )


def requested(name: str, kind: str, *overrides: str) -> LaunchRequest:
    """Return the request for the scheduler."""
    return Submission(resolved(name, kind, *overrides), RUN, None).scheduler_request()


def documents(name: str, kind: str, *overrides: str) -> list[dict[str, Any]]:
    """Return the objects of the manifest."""
    return list(yaml.safe_load_all(requested(name, kind, *overrides).files[0][1]))


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield paths of values that a schema's own model does not return."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs)):
            yield from differences(*pair, f"{path}[{number}]")
    elif ours != theirs:
        yield path


def unknown(value: dict[str, Any]) -> list[str]:
    """Return the fields that Kubeflow Trainer's models of a Job or a TrainJob do not have."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api, of extra dev"
    )
    kinds = {"Job": models.IoK8sApiBatchV1Job, "TrainJob": models.TrainerV1alpha1TrainJob}
    return sorted(
        differences(value, kinds[value["kind"]].from_dict(copy.deepcopy(value)).to_dict())
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_jobs_to_the_letter(name: str, kind: str) -> None:
    """The manifest is as expected, has the resolved recipe, and no secret."""
    request = requested(name, kind)
    text = request.files[0][1].replace(str(Path.cwd()), "/here")
    if kind != "azureml":
        chosen = resolved(name, kind).recipe_file.recipe
        inside = documents(name, kind)[0]["data"]["recipe.yaml"]
        assert recipe.parse_resolved_recipe(inside) == chosen
        # The recipe was compared above; its text would make the expected files long.
        text = re.sub(r"(  recipe.yaml: \|\n)(    .*\n)+", r"\1    ...\n", text)
    assert text == (GOLDEN / f"{name}-{kind}.yaml").read_text(encoding="utf-8")
    assert "s3cret" not in str(request)


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize("name", RECIPES)
def test_kubernetes_knows_every_field(name: str, kind: str) -> None:
    """Every field is one of the resources' schemas, as Kubeflow's models have them."""
    job = documents(name, kind)[-1]
    assert unknown(job) == []
    # A misspelled field must be detected, or the comparison proves nothing.
    wrong = copy.deepcopy(job)
    wrong["spec"]["backofLimit"] = 1
    holder = wrong["spec"]
    if kind == "trainjob":
        nodes = holder["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
            "replicatedJobs"
        ][0]
        holder = nodes["template"]["spec"]
    holder["template"]["spec"]["volume"] = []
    assert [path.rpartition(".")[2] for path in unknown(wrong)] == ["backofLimit", "volume"]


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a resource's schema that refuses unknown fields, as `kubectl create` does."""
    made = {
        key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()
    }
    if isinstance(made.get("properties"), dict) and not made.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.parametrize(
    ("version", "trainer"), [("2.2.1", "v2.2"), ("2.3.0", "v2.3"), ("2.3.0", "v2.2")]
)
def test_kubeflow_trainer_accepts_the_manifest(version: str, trainer: str) -> None:
    """The manifest is valid in that version's own resource definition."""
    # The definitions are in tests/control/api/crds.
    schema = json.loads(
        (GOLDEN.with_name("crds") / f"trainjob-{version}.json").read_text(encoding="utf-8")
    )
    more = (f"submit.kubernetes.trainer={trainer}", "submit.kubernetes.node_selector={gpu: h100}",
            "submit.kubernetes.service_account=me", "submit.kubernetes.memory=100Gi")  # fmt: skip
    job = documents("llama2-7b", "trainjob", *more)[-1]
    jsonschema.validate(job, strict(schema))
    nodes = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ][0]
    nodes["template"]["spec"]["template"]["spec"]["terminationGracePeriod"] = 75
    with pytest.raises(jsonschema.ValidationError, match="'terminationGracePeriod' was unexpected"):
        jsonschema.validate(job, strict(schema))


@pytest.mark.parametrize("name", RECIPES)
def test_azure_ml_reads_the_job(name: str, tmp_path: Path) -> None:
    """azure-ai-ml loads the job, and refuses a misspelled field."""
    load_job = pytest.importorskip(
        "azure.ai.ml", reason="pip install azure-ai-ml: 130 MB, so in no extra"
    ).load_job
    job = documents(name, "azureml")[0]
    job["inputs"]["recipe"]["path"] = str(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    read = load_job(path)
    assert (read.resources.instance_count, read.distribution.process_count_per_instance) == (4, 8)
    job["resources"]["instance_cont"] = job["resources"].pop("instance_count")
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(Exception, match="instance_cont"):
        load_job(path)


def test_what_a_failure_means() -> None:
    """Pods whose ranks have saved are created again, if the recipe allows a requeue."""
    rules = [documents("bert-large", "job", *more)[-1]["spec"]["podFailurePolicy"]["rules"]
             for more in ((), ("submit.requeue=false",))]  # fmt: skip
    assert [[rule["action"] for rule in each] for each in rules] == [
        ["Ignore", "Ignore", "FailJob"],
        ["FailJob"],
    ]
    assert rules[0][0]["onExitCodes"]["values"] == [85]
    spec = documents("bert-large", "job", "launch.max_restarts=3")[-1]["spec"]
    assert (spec["backoffLimit"], [rule["action"] for rule in spec["podFailurePolicy"]["rules"]]) == (
        3, ["Ignore", "Ignore", "FailJob"],
    )  # fmt: skip
    # No restart after an input error, a saved stop, and SIGHUP, SIGINT or SIGTERM.
    assert spec["podFailurePolicy"]["rules"][2]["onExitCodes"] == {
        "containerName": "train", "operator": "In", "values": [2, 85, 129, 130, 143],
    }  # fmt: skip
    # A single pod needs no host name, so it has no service.
    alone = documents("bert-large", "job", "launch.nodes=1")
    assert [each["kind"] for each in alone] == ["ConfigMap", "Job"]
    assert not any(
        "--master" in word
        for word in alone[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    )


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("azureml", (), "Azure ML has no restart of a command job"),
        (
            "trainjob",
            (),
            "a TrainJob has no such field; failurePolicy.maxRestarts of the runtime's JobSet",
        ),
        (
            "job",
            ("submit.requeue=false",),
            "the job may not be queued again (submit.requeue: false)",
        ),
    ],
)
def test_restarts_that_no_queue_does(kind: str, more: tuple[str, ...], why: str) -> None:
    """`launch.max_restarts` is refused if the scheduler cannot restart the run."""
    with pytest.raises(
        PlanError, match=re.escape(f"launch.max_restarts: 3 is not supported: {why}")
    ):
        requested("bert-large", kind, "launch.max_restarts=3", *more)


def test_names_fit_hosts() -> None:
    """A long name of a run is shortened to a valid name of a host."""
    # A host's name has at most 63 letters, and the pod's number is added.
    long = RunDir(f"/runs/2_{'Long.Name' * 10}-20260101-000000")
    text = Submission(resolved("bert-large", "job"), long, None).scheduler_request().files[0][1]
    name = list(yaml.safe_load_all(text))[-1]["metadata"]["name"]
    assert re.fullmatch(r"run-2-long-name[a-z0-9-]*-20260101-000000", name)
    assert len(name) <= 50


def test_options() -> None:
    """Each option of the recipe is in its field of the manifest."""
    more = (
        "cpu: '96', memory: 1000Gi, node_selector: {gpu: h100}, "
        "service_account: me, workdir: /work, namespace: ml"
    )
    pods = f"{PODS}, {more}}}"
    job = documents("bert-large", "job", pods)[-1]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "nvidia.com/gpu": "8",
        "cpu": "96",
        "memory": "1000Gi",
    }
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"gpu": "h100"}, "me")
    assert (pod["containers"][0]["workingDir"], job["metadata"]["namespace"]) == ("/work", "ml")
    fields = (
        "compute: c, environment: repo/train:1, distribution: mpi, "
        "experiment: e, code: m, workspace: w"
    )
    own = f"submit.azureml={{{fields}}}"
    azure = documents("bert-large", "azureml", own)[0]
    assert (azure["environment"], azure["distribution"]["type"]) == (
        {"image": "repo/train:1"},
        "mpi",
    )
    assert (azure["experiment_name"], azure["code"], azure["environment_variables"]) == (
        "e",
        str(Path.cwd() / "m"),
        {},
    )
    assert "--workspace-name=w" in requested("bert-large", "azureml", own).argv


def test_a_part_that_is_refused(fake: Path) -> None:
    """A job whose recipe or service the cluster refuses is deleted, and the run can be queued."""
    # A user who may create Jobs and ConfigMaps alone.
    (fake / "refused").write_text("Service")
    run = RunDir("x-20260101-000000")
    with pytest.raises(LaunchError, match="Forbidden: Service"):
        Submission(resolved("bert-large", "job"), run, run.path).queue_job()
    assert "kubectl delete job.batch/x-20260101-000000" in (fake / "calls").read_text()
    (fake / "refused").unlink()
    assert Submission(resolved("bert-large", "job"), run, run.path).queue_job().job_id


# What platform teams add; the third is of a cluster with RDMA.
MORE = {
    "pod": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "high",
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [
            {
                "name": "train",
                "resources": {"requests": {"memory": "500Gi"}, "limits": {"rdma/hca": "8"}},
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            }
        ],
    },
    "job": {"ttlSecondsAfterFinished": 86400, "activeDeadlineSeconds": 172800},
    "labels": {"team": "nlp"},
    "annotations": {"example.com/cost": "42"},
}


def test_fields_of_a_platform() -> None:
    """Fields of the pod and the job are merged with ours; every one is in the schema."""
    pods = f"{PODS}, {json.dumps(MORE)[1:]}"
    job = documents("bert-large", "job", pods)[-1]
    assert unknown(job) == []
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "8", "rdma/hca": "8"},
        "requests": {"memory": "500Gi"},
    }
    assert [each["name"] for each in container["volumeMounts"]] == [
        "recipe",
        "shm",
        "data-0",
        "scratch",
    ]
    assert [each["name"] for each in pod["volumes"]] == ["recipe", "shm", "data-0", "scratch"]
    assert (pod["priorityClassName"], pod["restartPolicy"]) == ("high", "Never")
    assert (job["spec"]["ttlSecondsAfterFinished"], job["spec"]["completions"]) == (86400, 4)
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert metadata["labels"]["team"] == "nlp"
        assert metadata["annotations"] == {"example.com/cost": "42"}
    own = (
        "submit.azureml={compute: c, environment: azureml:a@latest, job: {tags: {a: b}, resources: "
    )
    azure = documents("bert-large", "azureml", own + "{instance_type: ND96}}}")[0]
    assert (azure["tags"], azure["resources"]) == (
        {"a": "b"},
        {"instance_count": 4, "shm_size": "16g", "instance_type": "ND96"},
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"volumes": {"Bad Claim": "/data"}}, "Bad Claim"),
        ({"volumes": {"a": "/data", "b": "/data/"}}, "b: got /data/, where a is mounted"),
        ({"volumes": {"a": "/data", "b": "/dev/shm"}}, "b: got /dev/shm, which ortlaunch uses"),
        ({"image": "bad image:latest:x"}, "bad image:latest:x"),
        ({"image": "Repo/Train"}, "Repo/Train"),
        ({"queue": "Bad Queue"}, "Bad Queue"),
        ({"service_account": "A_b"}, "A_b"),
        ({"secret": "S_1"}, "S_1"),
        ({"gpu": "bad resource"}, "bad resource"),
        ({"node_selector": {"a b": "c d"}}, "a b"),
        ({"labels": {"a": "x y"}}, "x y"),
        ({"runs": "/data/../x"}, "write it without `..`"),
        ({"memory": "8Gi"}, "16Gi of /dev/shm count as memory, of which the pod has 8Gi"),
        ({"shared_memory": "1e9", "memory": "900M"}, "1e9 of /dev/shm"),
        # Kubernetes writes K for the binary unit alone.
        ({"shared_memory": "2048Ki", "memory": "1Mi"}, "2048Ki of /dev/shm"),
        ({"pod": {"restartPolicy": "Always"}}, "got restartPolicy, which ortlaunch sets itself"),
        ({"job": {"completions": 1}}, "got completions, which ortlaunch sets itself"),
        ({"tolerations": []}, "submit.kubernetes.pod, with this field"),
    ],
)
def test_names_that_kubernetes_refuses(given: dict[str, Any], said: str) -> None:
    """Names, paths and sizes that the server would refuse are refused before anything is sent."""
    pods = {"image": "repo/train:1", "runs": "/data/runs", "volumes": {"training": "/data"}}
    with pytest.raises(RecipeError, match=re.escape(said)):
        resolved("bert-large", "job", f"submit.kubernetes={json.dumps({**pods, **given})}")


def test_the_manifest_alone_is_printed(ortlaunch: Run, tmp_path: Path) -> None:
    """Standard output of --dry-run is a manifest that another program can read."""
    pods = f"{PODS}}}"
    words = (*WORLD, pods, "submit.scheduler=kubernetes")
    found = ortlaunch("submit", "bert-large/phase1", *words, "--dry-run")
    kinds = [each["kind"] for each in yaml.safe_load_all(found.out)]
    assert kinds == ["ConfigMap", "Service", "Job"]
    assert "sent by: kubectl create" in found.err


def test_what_is_slurms_is_said() -> None:
    """Fields that only Slurm has are named for another scheduler."""
    asked = resolved("bert-large", "job", "submit.partition=gpu", "submit.exclusive=true")
    assert notes_on_ignored_submit_and_binding_fields(asked) == [
        "ignored by kubernetes: submit.partition, submit.exclusive"
    ]


@pytest.mark.parametrize(
    ("status", "seen"),
    [
        ({}, QueueState(JobState.PENDING, "no pod is ready")),
        ({"active": 4, "ready": 0}, QueueState(JobState.PENDING, "no pod is ready")),
        ({"active": 4, "ready": 4}, QueueState(JobState.RUNNING, "pods are ready")),
        # The Jobs of a TrainJob have counts of their own.
        (
            {"jobsStatus": [{"name": "node", "ready": 1}]},
            QueueState(JobState.RUNNING, "pods are ready"),
        ),
        (["Suspended"], QueueState(JobState.PENDING, "Suspended (R, M)")),
        (["Complete"], QueueState(JobState.SUCCEEDED, "Complete")),
        (["SuccessCriteriaMet"], QueueState(JobState.SUCCEEDED, "SuccessCriteriaMet")),
        (["Failed"], QueueState(JobState.FAILED, "Failed (R, M)")),
    ],
)
def test_what_kubectl_says(status: Any, seen: QueueState) -> None:
    """The state follows from the job's conditions, else from its pods."""
    if isinstance(status, list):
        status = {
            "conditions": [
                {"type": kind, "status": "True", "reason": "R", "message": "M"} for kind in status
            ]
        }
    assert kubernetes.queue_state_of_job_object({"metadata": {}, "status": status}) == seen


def test_a_failure_that_saved() -> None:
    """A failure with exit code 85 counts as saved, in the controller's own wording."""
    said = (
        "Container train for pod ml/x-0-abc failed with exit code 85 "
        "matching FailJob rule at index 0"
    )
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": said}
    assert (
        kubernetes.queue_state_of_job_object(
            {"metadata": {}, "status": {"conditions": [failed]}}
        ).state
        is JobState.PREEMPTED
    )


# In place of kubectl and az.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> {here}/calls
case "$*" in
"ml job create"*) echo blue ;;
*create*)
    cat > {here}/sent
    (echo ---; cat {here}/sent) >> {here}/all
    if test -f {here}/refused && grep -q "kind: $(cat {here}/refused)" {here}/sent; then
        echo "Forbidden: $(cat {here}/refused)" >&2; exit 1
    fi
    echo '{{"metadata": {{"name": "x-20260101-000000", "uid": "u-1"}}}}' ;;
*delete*|*cancel*) rm -f {here}/answer ;;
*logs*|*stream*) echo hello ;;
*) test -f {here}/answer && cat {here}/answer; : ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """kubectl and az that record their calls and print the contents of `answer`."""
    for name in ("kubectl", "az"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(here=tmp_path))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def test_a_run_in_pods(fake: Path) -> None:
    """A run in pods is created, ready, read and deleted through kubectl."""
    # The run's folder here has the record of the job alone.
    run = RunDir("x-20260101-000000")
    named = "default/job.batch/x-20260101-000000"
    assert Submission(resolved("bert-large", "job"), run, run.path).queue_job().job_id == named
    (fake / "answer").write_text(json.dumps({"metadata": {}, "status": {"active": 4}}))
    assert str(read_status(run)).splitlines()[1:] == ["queued: no pod is ready"]
    (fake / "answer").write_text(json.dumps({"metadata": {}, "status": {"active": 4, "ready": 4}}))
    assert read_status(run).state is JobState.RUNNING
    assert "".join(iterate_rank_output_text(run, 0, follows_until_end=True)) == "hello\n"
    with pytest.raises(InputError, match="kubernetes shows only rank 0's node"):
        list(iterate_rank_output_text(run, 3, follows_until_end=False))
    assert cancel_run_and_wait_for_its_end(run).startswith("cancelled\n")
    assert read_status(run).state is JobState.CANCELLED
    calls = (fake / "calls").read_text().splitlines()
    assert calls[:2] == ["kubectl create --namespace=default --filename=- --output=json"] * 2
    # The job is first, and owns the others.
    job, *others = yaml.safe_load_all((fake / "all").read_text())
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x-20260101-000000", "uid": "u-1"}
    assert job["kind"] == "Job"
    assert [each["metadata"]["ownerReferences"] for each in others] == [[owner], [owner]]
    assert (
        "--selector=ortlaunch.run=x-20260101-000000,batch.kubernetes.io/job-completion-index=0"
        in "".join(calls)
    )


@pytest.mark.parametrize(
    ("word", "state", "status"),
    [
        ("Queued", "pending", None),
        ("Completed", "succeeded", 0),
        ("Failed", "failed", 1),
        ("Canceled", "cancelled", 1),
    ],
)
def test_a_run_of_azure_ml(fake: Path, word: str, state: str, status: int | None) -> None:
    """The state in the workspace is that of the run, and an end is recorded with it."""
    run = RunDir("one")
    assert (
        Submission(resolved("bert-large", "azureml"), run, run.path).queue_job().job_id == "//blue"
    )
    (fake / "answer").write_text(f"{word}\n")
    seen = read_status(run)
    assert (seen.state.value, seen.job.exit_status) == (state, status)
    assert word in seen.end_text()
    assert azureml.log_command_of_first_node("g/w/blue", follows_until_end=True)[-2:] == (
        "--resource-group=g",
        "--workspace-name=w",
    )


def test_a_job_that_nobody_knows_any_more(fake: Path) -> None:
    """The end of a job that the scheduler does not know any more is not guessed."""
    run = RunDir("one")
    Submission(resolved("bert-large", "job"), run, run.path).queue_job()
    assert (
        str(read_status(run).job.verdict)
        == "ortlaunch: kubernetes says: unknown to the scheduler, so its end is unknown"
    )


@pytest.mark.parametrize(("kind", "command"), [("job", "kubectl"), ("azureml", "az")])
def test_refused_or_absent(
    kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal has the command's own message, an absent command has advice."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        MissingDependency,
        match=f"{command} not found: use a host .*; --dry-run prints the job",
    ):
        Submission(resolved("bert-large", kind), RunDir("one"), Path("one")).queue_job()
    (tmp_path / command).write_text("#!/bin/sh\necho it exists already >&2\nexit 1\n")
    (tmp_path / command).chmod(0o755)
    with pytest.raises(LaunchError, match=f"{command} .*: it exists already"):
        Submission(resolved("bert-large", kind), RunDir("one"), Path("one")).queue_job()

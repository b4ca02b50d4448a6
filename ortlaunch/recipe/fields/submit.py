"""The recipe's section `submit`: resources that `ortlaunch submit` requests from a scheduler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ortlaunch.recipe.fields.section import APPLIED, Positive, Section, Text, Words

# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, each also after `days-`.
SlurmTime = Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")]

# A DNS label (RFC 1123): at most 63 characters.
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
# Kubernetes' resource quantities: a decimal number with a binary, a decimal or an exponent suffix.
Quantity = Annotated[
    str, Field(pattern=r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][-+]?[0-9]+)?$")
]
# A DNS subdomain (RFC 1123), the name of most objects.
ObjectName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253
    ),
]
# The key of a label, and a resource: a name of at most 63 letters, after a domain and a slash.
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
    ),
]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
# A registry with its port, a path, a tag and a digest.
Image = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$"
    ),
]
# A path in a pod: absolute, without blanks, colons and commas.
Path = Annotated[str, Field(pattern=r"^/[^\s:,]*$")]


class Container(Section, resume_rule=APPLIED):
    """Image that the ranks run in; it must contain ortlaunch."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """`pyxis`: srun's `--container-image`; `apptainer`: `apptainer exec --nv` on each rank."""
    image: Text
    """Name in the runtime's form, for example `nvcr.io#nvidia/pytorch:25.01-py3` or
    `/images/train.sif`."""
    mounts: Words = ()
    """Folders to mount, as `/data:/data`. The run folder and the current folder are always
    mounted."""


class Kubernetes(Section, resume_rule=APPLIED):
    """A run in pods, one for each node (`submit.scheduler: kubernetes`)."""

    kind: Literal["job", "trainjob"] = "job"
    """`job`: an indexed Job, as every cluster has it; `trainjob`: the TrainJob of Kubeflow Trainer
    2.2 or later."""
    trainer: Literal["v2.2", "v2.3"] = "v2.3"
    """Version of Kubeflow Trainer for `trainjob`; v2.3 is for later ones, too. A manifest for v2.2
    has no grace period of the pods: the runtime's applies (30 s by default), and
    `launch.grace_seconds` must fit into it."""
    image: Image
    """Image of the pods; it must contain ortlaunch."""
    runs: Path
    """Folder in which run folders are created, as pods see it, on one of `volumes`; as
    `/data/runs`."""
    volumes: Annotated[dict[ObjectName, Path], Field(min_length=1)]
    """Volume claims and their paths in the pods, as `{training: /data}`; several pods need a volume
    that all can write to."""
    workdir: Path = "/workspace"
    """Folder of the image or of a volume in which the command starts: for relative paths and your
    own modules."""
    namespace: KubernetesName = "default"
    """Namespace."""
    queue: ObjectName | None = None
    """Kueue's local queue."""
    runtime: ObjectName = "torch-distributed"
    """The TrainJob's cluster-wide runtime, one with `torch` and a job `node`."""
    secret: ObjectName | None = None
    """Secret with the variables that `launch.forward` names, as its keys; the manifest contains
    only their names."""
    # The name that NVIDIA's device plugin gives its resource; AMD's is `amd.com/gpu`.
    gpu: LabelKey = "nvidia.com/gpu"
    """Resource of which each rank requests one, where `launch.device` is cuda."""
    cpu: Quantity | None = None
    """Cores of each pod, as `"96"`."""
    memory: Quantity | None = None
    """Memory of each pod, as `1000Gi`."""
    # The container runtime's default is 64 MiB, which is too small for NCCL.
    shared_memory: Quantity = "16Gi"
    """Size of /dev/shm, which NCCL uses within a pod; it counts as memory."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels of nodes that pods may run on."""
    service_account: ObjectName | None = None
    """Service account of the pods."""
    labels: dict[LabelKey, LabelValue] = {}
    """More labels of the objects and the pods."""
    annotations: dict[LabelKey, str] = {}
    """Annotations of the objects and the pods."""
    pod: dict[Text, Any] = {}
    """More fields of the pods' spec, as Kubernetes names them: `{tolerations: [{key: gpu, operator:
    Exists}], securityContext: {runAsNonRoot: true}, imagePullSecrets: [{name: registry}],
    priorityClassName: high}`. Mappings are merged with ours, lists of named items by name: the
    container is `train` (`node` of a TrainJob), as `{containers: [{name: train, resources:
    {requests: {memory: 500Gi}, limits: {rdma/hca: "8"}}}]}`. Kubernetes checks them."""
    job: dict[Text, Any] = {}
    """More fields of the Job's or the TrainJob's spec, as `{ttlSecondsAfterFinished: 86400,
    activeDeadlineSeconds: 172800}`, merged in the same way."""


class AzureMl(Section, resume_rule=APPLIED):
    """A command job of Azure Machine Learning (`submit.scheduler: azureml`)."""

    compute: Text
    """Compute target, as `azureml:gpu-cluster`."""
    environment: Text
    """Image of a registry, or an environment of the workspace as `azureml:NAME@latest`; it must
    contain ortlaunch."""
    runs: Text = "azureml://datastores/workspaceblobstore/paths/runs"
    """Folder of a datastore in which run folders are created."""
    data: Text | None = None
    """Folder of a datastore or a data asset, as `azureml:wiki@latest`: it is mounted read-only, and
    the command starts in it, for relative paths."""
    code: Text | None = None
    """Folder of this machine that is uploaded: your own modules."""
    distribution: Literal["pytorch", "mpi"] = "pytorch"
    """Program that starts the ranks there."""
    experiment: Text | None = None
    """Experiment; null: the recipe's name."""
    shared_memory: Annotated[str, Field(pattern=r"^[0-9]+[bkmg]$")] = "16g"
    """Size of /dev/shm."""
    workspace: Text | None = None
    """Workspace; null: that of `az configure --defaults`."""
    resource_group: Text | None = None
    """Resource group; null: that of `az configure --defaults`."""
    job: dict[Text, Any] = {}
    """More fields of the command job, as Azure ML names them, merged with ours: `{identity: {type:
    managed}, limits: {timeout: 172800}, tags: {team: nlp}, queue_settings: {job_tier: standard},
    resources: {instance_type: Standard_ND96asr_v4}}`."""


class Submit(Section, resume_rule=APPLIED):
    """Requests to a scheduler beside `launch.nodes`, `launch.processes_per_node` and the device."""

    scheduler: Literal["slurm", "kubernetes", "azureml"] = "slurm"
    """Scheduler of the queue; `ortlaunch submit --scheduler` takes precedence. Fields of `submit`
    that are null are left to the cluster. All fields but `requeue`, `kubernetes` and `azureml` are
    Slurm's."""
    kubernetes: Kubernetes | None = None
    """Settings of the pods."""
    azureml: AzureMl | None = None
    """Settings of Azure Machine Learning."""
    partition: Text | None = None
    """Partition, or several with commas between them."""
    account: Text | None = None
    """Account that the time is charged to."""
    qos: Text | None = None
    """Quality of service."""
    reservation: Text | None = None
    """Reservation."""
    time: SlurmTime | None = None
    """Time limit in quotes, as `"30"` (minutes), `"4:00:00"` or `"2-12:00:00"`. The run saves
    before it and continues in a later job (`requeue`)."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option that requests GPUs, one for each rank: `--gpus-per-node=8`, or `--gres=gpu:8` for
    older clusters."""
    gpu_type: Text | None = None
    """Type of GPU, as `a100`."""
    cpus_per_task: Positive | None = None
    """Cores of each rank."""
    memory: Text | None = None
    """Memory of each node, as `200G`; `0` is all of it."""
    constraint: Text | None = None
    """Features that nodes must have."""
    nodelist: Text | None = None
    """Nodes that must be among those of the job, as `node[01-04]`."""
    exclude: Text | None = None
    """Nodes that must not be among those of the job."""
    exclusive: bool = False
    """Allow no other job on these nodes."""
    dependency: Text | None = None
    """Jobs to wait for, as `afterok:1234`."""
    begin: Text | None = None
    """Earliest start, as `now+1hour`."""
    mail_user: Text | None = None
    """Address for mail."""
    mail_type: Text | None = None
    """Events that send mail, as `END,FAIL`."""
    requeue: bool = True
    """Queue the job again when the run was stopped and has saved (exit status 85), before the time
    limit or by preemption, until it is done; not after `ortlaunch stop`, nor where a later job's
    time was over before its first step. False: end there. Azure ML and TrainJob cannot queue again:
    they end with that status, and `ortlaunch submit` with the same run folder continues. An indexed
    Job does not distinguish `ortlaunch stop` from other stops: end it by `ortlaunch cancel`."""
    # 65,535 is the limit of sbatch's --signal.
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    """Seconds before the time limit at which ranks must save and stop: more than a step and a
    checkpoint."""
    container: Container | None = None
    """Image that ranks run in; null: this environment, which every node must see under the same
    path."""
    setup: Words = ()
    """Lines of shell before the ranks start, as `module load cuda/12.4`. No secrets: the job gets
    the variables that your shell exports."""
    options: Words = ()
    """Further options for `#SBATCH`, as `--switches=1`."""

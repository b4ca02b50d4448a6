"""The recipe's section `submit`: how a scheduler is asked for the run's place (`ortlaunch
submit`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortlaunch.recipe.fields.section import Positive, Section, Text, Words

SlurmTime = Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")]

KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Quantity = Annotated[
    str, Field(pattern=r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][-+]?[0-9]+)?$")
]
Path = Annotated[str, Field(pattern=r"^/[^\s:,]*$")]


class Container(Section):
    """An image that the ranks run in; it must hold ortlaunch."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """`pyxis`: srun's `--container-image`; `apptainer`: `apptainer exec --nv` on each rank."""
    image: Text
    """As the runtime takes it, for example `nvcr.io#nvidia/pytorch:25.01-py3` or
    `/images/train.sif`."""
    mounts: Words = ()
    """Folders to bring in, as `/data:/data`. The run folder and the current folder are brought in
    anyway."""


class Kubernetes(Section):
    """A run in pods, one for each node (`submit.scheduler: kubernetes`)."""

    kind: Literal["job", "trainjob"] = "job"
    """`job`: an indexed Job, as every cluster has it; `trainjob`: the TrainJob of Kubeflow Trainer
    2.2 or later."""
    trainer: Literal["v2.2", "v2.3"] = "v2.3"
    """Version of Kubeflow Trainer for `trainjob`; v2.3 is for later ones, too. A manifest for v2.2
    has no grace period of the pods: the runtime's is in force (30 s by default), and
    `launch.grace_seconds` must fit into it."""
    image: Text
    """Image of the pods; it must hold ortlaunch."""
    runs: Path
    """Folder of the pods, on one of `volumes`, that run folders are made in; as `/data/runs`."""
    volumes: Annotated[dict[Text, Path], Field(min_length=1)]
    """Claims of volumes and where pods see them, as `{training: /data}`; several pods need one that
    all can write."""
    workdir: Path = "/workspace"
    """Folder of the image or of a volume that the command starts in: for relative paths and your
    own modules."""
    namespace: KubernetesName = "default"
    """Namespace."""
    queue: Text | None = None
    """Kueue's local queue."""
    runtime: Text = "torch-distributed"
    """The TrainJob's cluster-wide runtime, one with `torch` and a job `node`."""
    secret: Text | None = None
    """Secret that has the variables that `launch.forward` names, as its keys; the manifest has
    their names alone."""
    gpu: Text = "nvidia.com/gpu"
    """Resource that is asked for, one a rank, where `launch.device` is cuda."""
    cpu: Quantity | None = None
    """Cores of each pod, as `"96"`."""
    memory: Quantity | None = None
    """Memory of each pod, as `1000Gi`."""
    shared_memory: Quantity = "16Gi"
    """Size of /dev/shm, which NCCL uses within a pod; it counts as memory."""
    node_selector: dict[Text, str] = {}
    """Labels of nodes that pods may run on."""
    service_account: Text | None = None
    """Service account of the pods."""


class AzureMl(Section):
    """A command job of Azure Machine Learning (`submit.scheduler: azureml`)."""

    compute: Text
    """Compute target, as `azureml:gpu-cluster`."""
    environment: Text
    """Image of a registry, or an environment of the workspace as `azureml:NAME@latest`; it must
    hold ortlaunch."""
    runs: Text = "azureml://datastores/workspaceblobstore/paths/runs"
    """Folder of a datastore that run folders are made in."""
    data: Text | None = None
    """Folder of a datastore or a data asset, as `azureml:wiki@latest`: it is mounted to be read,
    and the command starts in it, for relative paths."""
    code: Text | None = None
    """Folder of this machine that is sent along: your own modules."""
    distribution: Literal["pytorch", "mpi"] = "pytorch"
    """What starts the ranks there."""
    experiment: Text | None = None
    """Experiment; null: the recipe's name."""
    shared_memory: Annotated[str, Field(pattern=r"^[0-9]+[bkmg]$")] = "16g"
    """Size of /dev/shm."""
    workspace: Text | None = None
    """Workspace; null: that of `az configure --defaults`."""
    resource_group: Text | None = None
    """Resource group; null: that of `az configure --defaults`."""


class Submit(Section):
    """What a job in a queue is asked for beside `launch.nodes`, `launch.processes_per_node` and the
    device. What is null is left to the cluster. All but `requeue`, `kubernetes` and `azureml` are
    Slurm's."""

    scheduler: Literal["slurm", "kubernetes", "azureml"] = "slurm"
    """Whose queue; `ortlaunch submit --scheduler` comes first."""
    kubernetes: Kubernetes | None = None
    """Pods."""
    azureml: AzureMl | None = None
    """Azure Machine Learning."""
    partition: Text | None = None
    """Partition, or several with commas between them."""
    account: Text | None = None
    """Whom the time is charged to."""
    qos: Text | None = None
    """Quality of service."""
    reservation: Text | None = None
    """Reservation."""
    time: SlurmTime | None = None
    """Time limit in quotes, as `"30"` (minutes), `"4:00:00"` or `"2-12:00:00"`. The run saves
    before it and goes on in a next turn (`requeue`)."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How GPUs are asked for, one a rank: `--gpus-per-node=8`, or `--gres=gpu:8` as older clusters
    have it."""
    gpu_type: Text | None = None
    """Kind of GPU, as `a100`."""
    cpus_per_task: Positive | None = None
    """Cores of each rank."""
    memory: Text | None = None
    """Memory of each node, as `200G`; `0` is all of it."""
    constraint: Text | None = None
    """Features that nodes must have."""
    nodelist: Text | None = None
    """Nodes that must be among those of the job, as `node[01-04]`."""
    exclude: Text | None = None
    """Nodes that must not."""
    exclusive: bool = False
    """No other job on these nodes."""
    dependency: Text | None = None
    """Jobs to wait for, as `afterok:1234`."""
    begin: Text | None = None
    """Not before this time, as `now+1hour`."""
    mail_user: Text | None = None
    """Who gets mail."""
    mail_type: Text | None = None
    """About what, as `END,FAIL`."""
    requeue: bool = True
    """Go back into the queue when the run was stopped and has saved (exit status 85), before the
    time limit or by preemption, until it is done; not after `ortlaunch stop`, nor where a later
    turn's time was over before its first step. False: end there. Azure ML and TrainJob cannot: they
    end with that status, and `ortlaunch submit` with the same run folder goes on. To an indexed Job
    `ortlaunch stop` is like the others: end it by `ortlaunch cancel`."""
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    """Seconds before the time limit at which ranks are asked to save and stop: more than a step and
    a checkpoint."""
    container: Container | None = None
    """Image that ranks run in; null: this environment, which the nodes must see under the same
    path."""
    setup: Words = ()
    """Lines of shell before the ranks start, as `module load cuda/12.4`. No secrets: what is
    exported in your shell goes with the job."""
    options: Words = ()
    """Further lines for `#SBATCH`, as `--switches=1`."""

"""The recipe's section `launch`: where ranks run.

The docstring under each field is the manual, as in models.py. Imports pydantic only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from ortlaunch.launchers import LAUNCHERS
from ortlaunch.recipe.fields.section import MAPPING, NUMBER, NameIn, Positive, Section, Text, Words


class NodeRange(Section):
    """How many hosts an elastic run may have."""

    min: Positive
    """With fewer the run ends."""
    max: Positive
    """Hosts of the host file at most."""

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


Nodes = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[NodeRange, Tag(MAPPING)],
    Discriminator(lambda value: MAPPING if isinstance(value, (dict, BaseModel)) else NUMBER),
]


class Launch(Section):
    """Where ranks run."""

    launcher: Annotated[str, NameIn(LAUNCHERS, "auto")] = "auto"
    """`auto`: the launcher or scheduler that this command already runs under; else one process per
    GPU; else one process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: cuda where there is a GPU."""
    nodes: Nodes | None = None
    """Hosts that the run must have; it never trains on fewer. A mapping {min, max}: the hosts of
    --hostfile of which some may be lost. After a fault the run goes on with those that are there,
    from its last complete checkpoint (`max_restarts`), with the same global batch; a host that is
    back is taken in at the next restart, or when `ortlaunch restart` asks for one. By torchrun
    through ssh."""
    processes_per_node: Annotated[int, Field(ge=1, le=9999)] | None = None
    """Ranks on each host; null: one per GPU, or one."""
    interface: Text | None = None
    """Network interface of every host that ranks meet on, as `ib0`; null: that of the route to the
    other hosts. Same as GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in `env`, which come first."""
    binding: Literal["auto", "none", "core", "numa"] = "auto"
    """Which cores of its host a rank runs on. `core`: as many for each rank, its own. `numa`: those
    of one NUMA node (with a GPU: the node beside it), which ranks share where there are more of
    them. `none`: all of them. `auto`: numa on a host with several NUMA nodes to which its ranks can
    be dealt out evenly, else none. Threads follow (OMP_NUM_THREADS). Under a launcher of your own
    that launcher binds (srun --cpu-bind); engine.json says what was."""
    preflight: bool = True
    """Look at every host before ranks of several are started through ssh, all at once: reached,
    same versions, GPUs, address, port, shared run folder, room for checkpoints (`ortlaunch doctor`
    looks at more). Not in a Slurm job."""
    grace_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """How long a run that is asked to stop (SIGTERM, SIGINT, SIGUSR1, `ortlaunch stop`) may take to
    finish its step and write a checkpoint; then it is killed. Make it shorter than the time that
    your cluster leaves."""
    env: dict[str, str] = {}
    """Environment variables for every rank, as `{NCCL_DEBUG: WARN}`. No secrets: export those in
    your shell."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """Start a run that failed again from its last complete checkpoint, so often without progress in
    between. Not after a stop that was asked for, an error of input, or the same failure at the same
    step as before. A job of `ortlaunch submit` is queued again by Slurm; an indexed Job of
    Kubernetes counts all failed pods (backoffLimit). Refused with Azure ML, a TrainJob and
    `submit.requeue: false`."""
    forward: Words = ()
    """Names of further environment variables of your shell to hand to every rank (values are never
    shown)."""

    @property
    def elastic(self) -> NodeRange | None:
        """How many hosts the run may have, where that is not one number."""
        return self.nodes if isinstance(self.nodes, NodeRange) else None

    @property
    def node_counts(self) -> range:
        """Every number of hosts that the recipe allows; empty where it says nothing."""
        if isinstance(self.nodes, NodeRange):
            return range(self.nodes.min, self.nodes.max + 1)
        return range(self.nodes, self.nodes + 1) if self.nodes else range(0)

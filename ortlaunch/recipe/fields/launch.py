"""The recipe's section `launch`: the hosts and processes of a run.

The docstring under each field is the manual, as in recipe.py. Imports pydantic only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from ortlaunch.recipe.fields.section import (
    APPLIED,
    MAPPING,
    NUMBER,
    NameIn,
    Positive,
    Section,
    Text,
    Words,
)
from ortlaunch.tables.launchers import LAUNCHERS


class NodeRange(Section, resume_rule=APPLIED):
    """Number of hosts of an elastic run."""

    min: Positive
    """Minimum; with fewer hosts the run ends."""
    max: Positive
    """Maximum; at most this many hosts of the host file are used."""

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


# Tags instead of a plain union: pydantic then reports errors of the chosen branch only.
Nodes = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[NodeRange, Tag(MAPPING)],
    Discriminator(lambda value: MAPPING if isinstance(value, (dict, BaseModel)) else NUMBER),
]


class Launch(Section, resume_rule=APPLIED):
    """Hosts and processes of the run."""

    # Names come from the table of launchers: a new row there is accepted here without a change.
    launcher: Annotated[str, NameIn(LAUNCHERS, "auto")] = "auto"
    """`auto`: the launcher or scheduler that already runs this command; else one process per GPU;
    else one process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: cuda where there is a GPU."""
    nodes: Nodes | None = None
    """Hosts that the run requires; it never trains on fewer. A mapping {min, max}: the hosts of
    --hostfile, of which some may be lost. After a fault the run continues on the remaining hosts,
    from its last complete checkpoint (`max_restarts`), with the same global batch; a host that is
    back is used again from the next restart on, or when `ortlaunch restart` requests one. By
    torchrun through ssh."""
    processes_per_node: Annotated[int, Field(ge=1, le=9999)] | None = None
    """Ranks on each host; null: one per GPU, or one."""
    interface: Text | None = None
    """Network interface of every host for the traffic among ranks, as `ib0`; null: that of the
    route to the other hosts. Same as GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in `env`, which take
    precedence."""
    binding: Literal["auto", "none", "core", "numa"] = "auto"
    """Cores of its host that a rank runs on. `core`: an equal number for each rank, not shared.
    `numa`: the cores of one NUMA node (with a GPU: the node next to it), which several ranks share
    where there are more ranks than nodes. `none`: all cores. `auto`: numa on a host with several
    NUMA nodes among which its ranks can be divided evenly, else none. The number of threads follows
    (OMP_NUM_THREADS). Under a launcher of your own that launcher binds (srun --cpu-bind);
    engine.json records the result. A rank's threads sleep while they wait for one another
    (OMP_WAIT_POLICY=passive), unless your environment sets this variable or GOMP_SPINCOUNT."""
    preflight: bool = True
    """Check every host, all at once, before ranks are started through ssh, on several hosts or on
    one that is not this machine: connection, same versions, GPUs, address, port, shared run folder,
    disk space for checkpoints (`ortlaunch doctor` checks more). Not in a Slurm job."""
    grace_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Seconds that a run may take, after a request to stop (SIGTERM, SIGINT, SIGUSR1, `ortlaunch
    stop`), to finish its step and write a checkpoint; then it is killed. Set less than the time
    that your cluster allows."""
    env: dict[str, str] = {}
    """Environment variables for every rank, as `{NCCL_DEBUG: WARN}`. No secrets: export those in
    your shell."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of times in a row, without progress in between, that a failed run is started again
    from its last complete checkpoint. Not after a requested stop, an input error, or the same
    failure at the same step as before. Slurm queues a job of `ortlaunch submit` again; an indexed
    Job of Kubernetes counts all failed pods (backoffLimit). Refused with Azure ML, a TrainJob and
    `submit.requeue: false`."""
    forward: Words = ()
    """Names of further environment variables of your shell that every rank gets (values are never
    shown)."""

    @property
    def elastic(self) -> NodeRange | None:
        """The allowed numbers of hosts of an elastic run; None for a fixed number."""
        return self.nodes if isinstance(self.nodes, NodeRange) else None

    @property
    def node_counts(self) -> range:
        """Every number of hosts that the recipe allows; empty where `nodes` is null."""
        if isinstance(self.nodes, NodeRange):
            return range(self.nodes.min, self.nodes.max + 1)
        return range(self.nodes, self.nodes + 1) if self.nodes else range(0)

"""The table of launchers, by the names that recipes and plans have. Standard library only, for every side.

Another one takes a row here and its module in launch/; `plan.started_by` is the row.
"""

from __future__ import annotations

from typing import NamedTuple


class Launcher(NamedTuple):
    """What starts the ranks of a run."""

    module: str
    """Its backend (launch/), loaded on use; "": there is none, for somebody else started the ranks."""
    program: str
    """The command that starts the ranks and waits for them; "": ortlaunch's own."""
    rendezvous: str
    """How ranks of several hosts meet, for a person."""
    single: bool = False
    """Whether it starts one process, on this host alone."""
    sees_lost_hosts: bool = False
    """Whether an elastic run can be started by it."""
    package: str = ""
    """What it needs on more than one host, of the extra with its own name."""
    note: str = ""
    """For whoever makes a plan."""
    stays_after_loss: bool = False
    """Whether it, and the ranks of other hosts, stay when a host is lost: a rank that is cut off must end it."""

    @property
    def is_ours(self) -> bool:
        """Whether ortlaunch starts it, and knows of its end."""
        return bool(self.module)


INSIDE = "inside"
"""In place of a launcher's name: this process is a rank already, of a launcher of the user's own."""
_INSIDE = Launcher("", "their launcher", "as the launcher's environment says")

LAUNCHERS = {
    "local": Launcher("ortlaunch.launch.local", "", "none: one process", single=True),
    "torchrun": Launcher(
        "ortlaunch.launch.torchrun",
        "torchrun",
        "a file in the run folder, then a port of rank 0's host",
        sees_lost_hosts=True,
    ),
    "mpi": Launcher(
        "ortlaunch.launch.mpi",
        "mpirun",
        "a port of rank 0's host, sent through MPI",
        package="mpi4py",
        # PRRTE's listener (oob_tcp_listener.c) and Hydra's bind INADDR_ANY, whichever interface they
        # are configured to use.
        note="launcher mpi: mpirun itself listens on every interface of this host, for "
        "which it has no setting; on one "
        "host launcher torchrun opens no port",
        stays_after_loss=True,
    ),
}


def launcher_of(name: str) -> Launcher:
    """The row of a plan's launcher, also of INSIDE."""
    return _INSIDE if name == INSIDE else LAUNCHERS[name]


def rendezvous(name: str, hosts: int) -> str:
    """How the ranks of a plan meet."""
    launcher = launcher_of(name)
    alone = hosts == 1 and launcher.is_ours and not launcher.single
    return "a file in the run folder" if alone else launcher.rendezvous

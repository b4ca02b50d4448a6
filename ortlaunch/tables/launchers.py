"""The table of launchers, by the names in recipes and plans. Standard library only, for every side.

A new launcher is a row here and a module in launch/; `plan.started_by` is the row.
"""

from __future__ import annotations

from typing import NamedTuple


class Launcher(NamedTuple):
    """The properties of a launcher, which starts the ranks of a run."""

    module: str
    """Its backend (launch/), imported on use; "": none, another program started the ranks."""
    program: str
    """The command that starts the ranks and waits for them; "": ortlaunch itself."""
    rendezvous: str
    """How ranks of several hosts meet, as text."""
    single: bool = False
    """Whether it starts only one process, on this host."""
    sees_lost_hosts: bool = False
    """Whether it can start an elastic run."""
    package: str = ""
    """The package that it needs on more than one host, in the extra of the launcher's name."""
    note: str = ""
    """A note that `ortlaunch plan` prints."""
    stays_after_loss: bool = False
    """Whether it and the ranks of other hosts continue after the loss of a host; a rank that is cut
    off must then end it."""

    @property
    def is_ours(self) -> bool:
        """Whether ortlaunch starts it, and so detects its end."""
        return bool(self.module)


INSIDE = "inside"
"""The launcher's name in a plan if the user's own launcher has already started this rank."""
# No module and no program: ortlaunch starts nothing, and the environment determines the world.
_INSIDE = Launcher("", "their launcher", "as the launcher's environment says")

LAUNCHERS = {
    "local": Launcher("ortlaunch.launch.local", "", "none: one process", single=True),
    "torchrun": Launcher(
        "ortlaunch.launch.torchrun",
        "torchrun",
        "a TCP port of rank 0's host, named in the run folder",
        sees_lost_hosts=True,
    ),
    "mpi": Launcher(
        "ortlaunch.launch.mpi",
        "mpirun",
        "a TCP port of rank 0's host, sent by MPI",
        package="mpi4py",
        # PRRTE's listener (oob_tcp_listener.c) and Hydra's bind INADDR_ANY, whichever interface they
        # are configured to use.
        note="launcher mpi: mpirun opens a port on every interface of this host, which no "
        "setting prevents; launcher torchrun opens none on one host",
        stays_after_loss=True,
    ),
}


def launcher_row(launcher_name: str) -> Launcher:
    """Return the row of a plan's launcher, which may be INSIDE."""
    return _INSIDE if launcher_name == INSIDE else LAUNCHERS[launcher_name]


def reason_launcher_is_refused(launcher_name: str | None) -> str:
    """Return the reason why an option cannot name this launcher; "" if it can."""
    if launcher_name in (None, "auto", *LAUNCHERS):
        return ""
    # Users of other tools name the queue as the launcher.
    queue = launcher_name in ("slurm", "sbatch", "kubernetes", "azureml")
    scheduler_text = "that is a scheduler: ortlaunch submit RECIPE --scheduler NAME; --launcher is "
    return f"got {launcher_name}; {scheduler_text if queue else ''}one of {', '.join(('auto', *LAUNCHERS))}"


def rendezvous_text(launcher_name: str, host_count: int) -> str:
    """Return how the ranks of a plan meet, as text."""
    launcher = launcher_row(launcher_name)
    # On one host ortlaunch's launchers use a file, which needs no port.
    alone = host_count == 1 and launcher.is_ours and not launcher.single
    return "a file in the run folder" if alone else launcher.rendezvous

"""The table of launchers, by the names that recipes and plans have. Standard library only, for every side.

Another one takes a line here, its module in launch/ and its word in the recipe's `launch.launcher`.
"""

from __future__ import annotations

from typing import NamedTuple


class Launcher(NamedTuple):
    """What starts the ranks of a run."""

    module: str
    """Its backend (launch/), loaded on use."""
    program: str
    """The command that starts the ranks and waits for them; empty: ortlaunch's own."""
    rendezvous: str
    """How ranks meet, for a person."""


INSIDE = "inside"
"""In place of a launcher's name: this process is a rank already, of a launcher of the user's own."""

LAUNCHERS = {
    "local": Launcher("ortlaunch.launch.local", "", "none: one process"),
    "torchrun": Launcher(
        "ortlaunch.launch.torchrun",
        "torchrun",
        "a file in the run folder; on one host no port is opened, else one of rank 0's address",
    ),
    "mpi": Launcher(
        "ortlaunch.launch.mpi",
        "mpirun",
        "on one host a file in the run folder, else a port of rank 0's address, told through MPI",
    ),
}


def rendezvous(name: str) -> str:
    """How the ranks of a plan meet."""
    return "as the launcher's environment says" if name == INSIDE else LAUNCHERS[name].rendezvous

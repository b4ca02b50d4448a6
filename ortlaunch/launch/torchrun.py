"""Start the ranks through torchrun, on this host or on each of several (launch/over_ssh.py).

torchrun's own rendezvous would listen on every interface and unpickle data from anybody. Here the
rendezvous is a file, new for each start: on one host in a folder that only this user can write to,
on several hosts in the run folder, which they share. Ranks of one host meet through another file.
Ranks of several hosts meet at a port of rank 0's address, which is published in the run folder
(worker/process_group/join.py).

The rendezvous file serves at most `MOST_RENDEZVOUS_HOSTS` hosts. For more, launch/node.py replaces
torchrun and sets the same variables: the plan numbers the hosts already. All hosts have the same
number of ranks, because torchrun documents no other case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.base import module_start
from ortlaunch.base.errors import PlanError
from ortlaunch.launch import LaunchRequest, launch_limits, stop_request_if_plan_saves
from ortlaunch.launch.private import private_folder_path_in_tmp
from ortlaunch.launch.ssh import needs_no_ssh
from ortlaunch.launch_plan import Node, Plan
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir

# Each host reads the whole file, which grows with the square of the number of hosts.
MOST_RENDEZVOUS_HOSTS = 64
# Each keep-alive makes the file longer, and ssh detects a lost host.
_KEEP_ALIVE_SECONDS = 3600
# Else torchrun opens a port for a store of the ranks.
_NO_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def require_launchable_hosts(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """Check that all hosts have the same number of slots: torchrun documents no other case."""
    slots = sorted({node.slots for node in nodes})
    if len(slots) > 1:
        raise PlanError(
            "launcher torchrun needs the same number of ranks on every host, and they have "
            f"{' and '.join(map(str, slots))} slots; make them equal, or use launcher mpi"
        )


def launch_request_of_plan(plan: Plan, run_dir: RunDir) -> LaunchRequest:
    """Return a torchrun command with a rendezvous in a file; it never restarts ranks by itself."""
    require_launchable_hosts(plan.nodes, run_dir)
    # torchrun warns and sets OMP_NUM_THREADS=1 where it is unset.
    env = {
        "OMP_NUM_THREADS": str(plan.threads or 1),
        # A supervisor ends its rank after the grace. A suspended supervisor is killed 2 s after that,
        # not after torchrun's default of 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (
            f"{(plan.grace_seconds if plan.traits.saves else GRACE_SECONDS) + 2:.0f}"
        ),
        **_NO_STORE,
        # Its own exceptions. Ranks get other files, because they cannot distinguish torchrun's
        # exception from a stop.
        "TORCHELASTIC_ERROR_FILE": str(run_dir.launcher_error),
        **dict(plan.env),
    }
    if len(plan.nodes) > 1 or not needs_no_ssh(plan.nodes[0].host):
        return _torchrun_request_over_ssh(plan, run_dir, env)
    private_path = private_folder_path_in_tmp(run_dir)
    rendezvous = private_path / run_dir.rendezvous.name
    # Without --log-dir, torchrun leaves a folder in /tmp for good.
    argv = _torchrun_argv_of_one_host(
        plan, run_dir, "localhost", rendezvous, (f"--log-dir={private_path}",)
    )
    files = ((str(rendezvous), ""),)
    stop = stop_request_if_plan_saves(plan, run_dir)
    return LaunchRequest(
        argv,
        tuple(sorted(env.items())),
        files,
        notifies_ranks=False,
        stop=stop,
        private_folder=str(private_path),
        limits=launch_limits(plan, run_dir),
    )


def _torchrun_request_over_ssh(
    plan: Plan, run_dir: RunDir, torchrun_variables: dict[str, str]
) -> LaunchRequest:
    # Without `threads` in the plan, each host's own value of OMP_NUM_THREADS counts.
    if plan.threads is None:
        torchrun_variables = {
            name: value
            for name, value in torchrun_variables.items()
            if name != "OMP_NUM_THREADS" or name in dict(plan.env)
        }
    exceeds_rendezvous = len(plan.nodes) > MOST_RENDEZVOUS_HOSTS
    # A torchrun of an earlier start on a host that comes back must not find this one's file.
    rendezvous = run_dir.rendezvous / os.urandom(4).hex()
    # torchrun orders the nodes by the name in --local-addr, hence the number with leading zeros.
    agents = [
        {
            "host": node.host,
            "argv": _argv_of_one_host_without_rendezvous(plan, run_dir, node_index)
            if exceeds_rendezvous
            else _torchrun_argv_of_one_host(
                plan, run_dir, f"{node_index:05d}.{node.host}", rendezvous
            ),
        }
        for node_index, node in enumerate(plan.nodes)
    ]
    job_message = {
        "agents": agents,
        "env": dict(sorted(torchrun_variables.items())),
        "forward": plan.forward,
        "grace_seconds": plan.grace_seconds if plan.traits.saves else GRACE_SECONDS,
    }
    files = (
        (str(rendezvous), ""),
        (str(run_dir.meeting), ""),
        (str(run_dir.agents), json.dumps(job_message) + "\n"),
    )
    argv = (
        *module_start.module_command("ortlaunch.launch.over_ssh", plan.argv[0]),
        str(run_dir.agents),
    )
    return LaunchRequest(
        argv,
        files=files,
        stop=stop_request_if_plan_saves(plan, run_dir),
        limits=launch_limits(plan, run_dir),
    )


def _argv_of_one_host_without_rendezvous(
    plan: Plan, run_dir: RunDir, node_index: int
) -> tuple[str, ...]:
    """Return the command of one of many hosts: launch/node.py, which needs no rendezvous."""
    return (
        *module_start.module_command("ortlaunch.launch.node", plan.argv[0]),
        f"--nodes={len(plan.nodes)}",
        f"--ranks={plan.nodes[0].slots}",
        f"--number={node_index}",
        # Never used: the ranks meet through the run folder.
        "--master=127.0.0.1",
        "--",
        *plan.argv,
        str(run_dir),
    )


def _torchrun_argv_of_one_host(
    plan: Plan,
    run_dir: RunDir,
    node_name: str,
    rendezvous_file: Path,
    extra_options: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Return the command of one host; torchrun numbers the hosts in the order of `node_name`."""
    return (
        *module_start.module_command("torch.distributed.run", plan.argv[0]),
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={plan.nodes[0].slots}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous_file}",
        f"--rdzv-conf=store_type=file,keep_alive_interval={_KEEP_ALIVE_SECONDS}",
        f"--local-addr={node_name}",
        *extra_options,
        # launch/restarts.py restarts the ranks, for all launchers alike.
        "--max-restarts=0",
        "--no-python",
        *plan.argv,
        str(run_dir),
    )

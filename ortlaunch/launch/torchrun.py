"""The ranks through torchrun: one on this host, or one on each of several, started through ssh (launch/over_ssh.py).

Its rendezvous would listen on every interface and unpickle what anybody puts there. Here it is a file, new for each
start: on one host in a folder that this user alone can write to, on several in the run folder, which they share. Ranks
of one host meet in another file, those of several at a port of rank 0's address that is told through the run folder
(worker/process_group/join.py). On more hosts than such a file serves, launch/node.py takes torchrun's place,
with the same variables: the plan numbers the hosts already. A world of several hosts has as many ranks on each:
torchrun documents no other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ortlaunch import start
from ortlaunch.errors import PlanError
from ortlaunch.launch import Request, given_up_of, stop_of, store_file
from ortlaunch.launch.private import private_folder
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.launch.ssh import needs_no_ssh
from ortlaunch.plan import Node, Plan
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir

__all__ = ["cancel", "check", "request", "state", "submit", "wait"]

MOST_RENDEZVOUS_HOSTS = (
    64  # the file is read whole by each host, and grows with the square of the hosts
)
_KEEP_ALIVE_SECONDS = 3600  # each one makes the file longer; a lost host is seen by ssh
_NO_STORE = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
}  # else torchrun opens a port for a store of the ranks


def check(nodes: Sequence[Node], run_dir: RunDir) -> None:
    """As many ranks on every host: torchrun documents no other number."""
    slots = sorted({node.slots for node in nodes})
    if len(slots) > 1:
        raise PlanError(
            f"launcher torchrun takes as many ranks on every host, and they have {' and '.join(map(str, slots))} "
            "slots; make them equal, or use launcher mpi"
        )


def request(plan: Plan, run_dir: RunDir) -> Request:
    """torchrun with a rendezvous in a file; it never restarts ranks by itself."""
    check(plan.nodes, run_dir)
    # torchrun warns and sets OMP_NUM_THREADS=1 where it is unset.
    env = {
        "OMP_NUM_THREADS": str(plan.threads or 1),
        **_grace(plan),
        **_NO_STORE,
        **_error_file(run_dir),
        **dict(plan.env),
    }
    if len(plan.nodes) > 1 or not needs_no_ssh(plan.nodes[0].host):
        return _on_hosts(plan, run_dir, env)
    private = private_folder(run_dir)
    rendezvous = private / run_dir.rendezvous.name
    argv = _torchrun(
        plan, run_dir, "localhost", rendezvous, (f"--log-dir={private}",)
    )  # else a folder for good in /tmp
    files = ((str(rendezvous), ""), *store_file(plan, run_dir))
    stop = stop_of(plan, run_dir)
    return Request(
        argv, tuple(sorted(env.items())), files, tells_ranks=False, stop=stop, private=str(private)
    )


def _on_hosts(plan: Plan, run_dir: RunDir, env: dict[str, str]) -> Request:
    """One torchrun on each host; they count themselves in the order of the names that they are given."""
    if plan.threads is None:
        env = {
            name: value
            for name, value in env.items()
            if name != "OMP_NUM_THREADS" or name in dict(plan.env)
        }
    many = len(plan.nodes) > MOST_RENDEZVOUS_HOSTS
    agents = [
        {"host": node.host, "argv": _node(plan, run_dir, number) if many
         else _torchrun(plan, run_dir, f"{number:05d}.{node.host}", run_dir.rendezvous)}
        for number, node in enumerate(plan.nodes)
    ]  # fmt: skip
    work = {"agents": agents, "env": dict(sorted(env.items())), "forward": plan.forward}
    files = (
        (str(run_dir.rendezvous), ""),
        (str(run_dir.meeting), ""),
        (str(run_dir.agents), json.dumps(work) + "\n"),
        *store_file(plan, run_dir),
    )
    argv = (*start.command("ortlaunch.launch.over_ssh", plan.argv[0]), str(run_dir.agents))
    return Request(
        argv, files=files, stop=stop_of(plan, run_dir), given_up=given_up_of(plan, run_dir)
    )


def _node(plan: Plan, run_dir: RunDir, number: int) -> tuple[str, ...]:
    """The command on one of many hosts: ortlaunch's own starter of ranks, which needs no rendezvous."""
    return (
        *start.command("ortlaunch.launch.node", plan.argv[0]),
        f"--nodes={len(plan.nodes)}",
        f"--ranks={plan.nodes[0].slots}",
        f"--number={number}",
        "--master=127.0.0.1",  # never used: ranks meet through the run folder
        "--",
        *plan.argv,
        str(run_dir),
    )


def _torchrun(
    plan: Plan, run_dir: RunDir, name: str, rendezvous: Path, more: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The command on one host; ranks are counted in the order of `name`."""
    return (
        *start.command("torch.distributed.run", plan.argv[0]),
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={plan.nodes[0].slots}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}",
        f"--rdzv-conf=store_type=file,keep_alive_interval={_KEEP_ALIVE_SECONDS}",
        f"--local-addr={name}",
        *more,
        "--max-restarts=0",
        "--no-python",
        *plan.argv,
        str(run_dir),
    )


def _error_file(run_dir: RunDir) -> dict[str, str]:
    """Where torchrun writes an exception of its own, which ranks cannot tell from a stop; they get other files."""
    return {"TORCHELASTIC_ERROR_FILE": str(run_dir.launcher_error)}


def _grace(plan: Plan) -> dict[str, str]:
    """A guardian ends its rank after the grace; one that is stopped is killed soon after it, not after 30 s."""
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{(plan.grace_seconds if plan.traits.saves else GRACE_SECONDS) + 2:.0f}"
    }

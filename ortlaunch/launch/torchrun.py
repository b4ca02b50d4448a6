"""The ranks of this host through torchrun.

Its rendezvous would listen on every interface and unpickle what anybody puts there. Here it is a file of the run
folder, new for each start, and the ranks meet in another (worker/distributed.py).
"""

from __future__ import annotations

from ortlaunch import start
from ortlaunch.launch import Request, store_file
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.plan import Plan
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run.folder import RunDir

__all__ = ["cancel", "request", "state", "submit", "wait"]

_KEEP_ALIVE_SECONDS = 3600  # each one makes the file longer; for torchrun's other hosts, of which there are none
# A guardian ends its rank after the grace; one that is stopped is killed soon after it, not after torchrun's 30 s.
_GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{GRACE_SECONDS + 2:.0f}"}
_NO_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torchrun opens a port for a store of the ranks


def request(plan: Plan, run_dir: RunDir) -> Request:
    """torchrun with a rendezvous in the run folder; it never restarts ranks by itself."""
    argv = (
        *start.command("torch.distributed.run", plan.argv[0]),
        "--nnodes=1",
        f"--nproc-per-node={plan.world_size}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={run_dir.rendezvous}",
        f"--rdzv-conf=store_type=file,keep_alive_interval={_KEEP_ALIVE_SECONDS}",
        "--local-addr=localhost",
        "--max-restarts=0",
        "--no-python",
        *plan.argv,
        str(run_dir),
    )
    # torchrun warns and sets OMP_NUM_THREADS=1 where it is unset.
    env = {"OMP_NUM_THREADS": str(plan.threads or 1), **_GRACE, **_NO_STORE, **dict(plan.env)}
    files = ((str(run_dir.rendezvous), ""), *store_file(plan, run_dir))
    return Request(argv, tuple(sorted(env.items())), files, tells_ranks=False)

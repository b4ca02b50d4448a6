"""The ranks of this host through torchrun."""

from __future__ import annotations

from ortlaunch.launch import Request
from ortlaunch.launch.processes import cancel, state, submit, wait
from ortlaunch.plan import Plan
from ortlaunch.rundir import RunDir

__all__ = ["cancel", "request", "state", "submit", "wait"]


def request(plan: Plan, run_dir: RunDir) -> Request:
    """torchrun with a rendezvous on a port that the kernel chooses; it never restarts ranks by itself."""
    python, *worker = plan.argv
    argv = (
        python,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={plan.world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=localhost",
        "--max-restarts=0",
        "--no-python",
        python,
        *worker,
        str(run_dir),
    )
    # torchrun warns and sets OMP_NUM_THREADS=1 where it is unset; the worker divides the cores itself.
    env = {"OMP_NUM_THREADS": "1", **dict(plan.env)}
    return Request(argv, tuple(sorted(env.items())))

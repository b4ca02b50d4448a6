"""One try of `micro_size: auto`: `start.py ortlaunch.worker.tasks.trial RUN_FOLDER` takes two steps and records memory.

A rank that runs out of memory ends like any other rank that fails; the control side reads that (micro_size.py).
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, write_json
from ortlaunch.worker.__main__ import main

if TYPE_CHECKING:  # heavy; the rank's guardian forks before they are imported
    from ortlaunch.worker.data import Batches
    from ortlaunch.worker.distributed import DistributedContext
    from ortlaunch.worker.engine import Engine

_MOST_STEPS = 40  # fp16 skips steps until its loss scale fits, and optimizer state comes with the first one taken


def try_steps(
    recipe: Recipe, plan: Plan, run: RunDir, group: DistributedContext, engine: Engine, batches: Batches
) -> None:
    """Take two whole steps, so that gradients accumulate beside optimizer state; write how much room they took."""
    from ortlaunch.worker.memory_limits import RankLimits
    from ortlaunch.worker.tasks.train import TrainState, train_step

    group.barrier()
    limits = RankLimits(group.device, group.local.local_world_size)
    group.barrier()  # nobody takes more before all have looked
    state = TrainState()
    while state.step - state.skipped < 2 and state.step < _MOST_STEPS:
        train_step(recipe, plan, group, engine, batches, state)
        state.step += 1
    share, limit = limits.tightest()
    used = {"share": share, "taken": limit.taken(), "free": limit.free}
    mine = {**used, "limit": limit.name, "limit_bytes": limit.size, "rank": group.rank}
    ranks = [json.loads(text) for text in group.gather(json.dumps(mine))]
    if group.rank == 0:
        write_json(run.trial, max(ranks, key=lambda rank: float(rank["share"])))


def _die_first() -> None:
    """Where memory ends, the kernel should end this try and nothing else."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _die_first()
    sys.exit(main(try_steps))

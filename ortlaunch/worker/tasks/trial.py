"""One try of a size for `micro_size: auto`: two steps, and how much memory they took.

A rank that runs out of memory ends like any other rank that fails; the control side reads that (run/micro_size.py).
"""

from __future__ import annotations

import json

from ortlaunch.errors import EngineError
from ortlaunch.run_folder.folder import write_json
from ortlaunch.worker.engine.memory_limits import RankLimits
from ortlaunch.worker.session import Session
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import ParitySteps, parity_steps

_MOST_STEPS = 40  # fp16 skips steps until its loss scale fits, and optimizer state comes with the first one taken


def run(session: Session) -> None:
    """Take two whole steps, so that gradients accumulate beside optimizer state; write how much room they took."""
    group = session.group
    group.barrier()
    limits = RankLimits(group.device, group.local.local_world_size)
    group.barrier()  # nobody takes more before all have looked
    state = TrainState()
    parity = parity_steps(session, first_step=0)
    while state.step - state.skipped < 2 and state.step < _MOST_STEPS:
        if parity is not None and state.step < parity.end:
            _rehearse(parity, state.step)
        train_step(session, state)
        state.step += 1
    share, limit = limits.tightest()
    used = {"share": share, "taken": limit.taken(), "free": limit.free}
    mine = {**used, "limit": limit.name, "limit_bytes": limit.size, "rank": group.rank}
    ranks = [json.loads(text) for text in group.gather(json.dumps(mine))]
    if group.rank == 0:
        write_json(session.run.trial, max(ranks, key=lambda rank: float(rank["share"])))


def _rehearse(parity: ParitySteps, step: int) -> None:
    """Compare for the memory that it takes; the training judges the numbers."""
    record = parity.compared(step)
    if "error" in record and not record.get("random"):
        raise EngineError(record["error"])

"""A trial of one size for `micro_size: auto`: the memory use of two steps.

A rank that runs out of memory ends like any other rank that fails. The control side detects that
(run/micro_size.py).
"""

from __future__ import annotations

from ortlaunch.base.errors import EngineError
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.engine.memory_limits import RankMemoryLimits
from ortlaunch.worker.session import Session
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import ParitySteps, create_parity_steps_or_note_why_not

# fp16 skips steps until its loss scale fits, and the first step that is not skipped makes the
# optimizer state.
_MOST_STEPS = 40


def run(session: Session) -> None:
    """Run two whole steps, and write the memory use of the worst rank.

    Gradients accumulate beside optimizer state in the second step only.
    """
    group = session.group
    group.barrier()
    limits = RankMemoryLimits(group.device, group.local.local_world_size)
    # No rank may allocate more before all ranks have read their limits.
    group.barrier()
    state = TrainState()
    parity = create_parity_steps_or_note_why_not(session, first_step=0)
    while state.step - state.skipped < 2 and state.step < _MOST_STEPS:
        if parity is not None and state.step < parity.end_step:
            _run_comparison_and_raise_its_error(parity, state.step)
        train_step(session, state)
        state.step += 1
    used_share, limit = limits.used_fraction_and_tightest_limit()
    memory_record = {"share": used_share, "taken": limit.used_bytes(), "free": limit.free}
    rank_record = {
        **memory_record,
        "limit": limit.name,
        "limit_bytes": limit.size,
        "rank": group.rank,
    }
    records_by_rank = group.gather(rank_record)
    if group.rank == 0:
        # The rank with the least memory left decides.
        write_json_atomically(
            session.run.trial, max(records_by_rank, key=lambda rank: float(rank["share"]))
        )


def _run_comparison_and_raise_its_error(parity: ParitySteps, step_index: int) -> None:
    """Run a comparison for its memory use; the training itself judges the result."""
    record = parity.compare_step_on_this_rank(step_index)
    if "error" in record and not record.get("random"):
        raise EngineError(record["error"])

"""Two ranks with requests at different steps; each writes every decision, and a profile of one.

Each also writes texts and arrays that it has gathered from both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ortlaunch.rank import Rank
from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import RankRequest
from ortmodule_tests.leaving import leave

STEPS = 300


def main(rank: int, folder: Path) -> None:
    """Make the requests of plan.json: {rank: {step: request}}."""
    plan = json.loads((folder / "plan.json").read_text())[str(rank)]
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    group = DistributedContext(Rank(rank, 2, rank, 2), torch.device("cpu"))
    decided = []
    with accept_save_and_stop_requests(group) as agreed:
        for step in range(STEPS):
            if str(step) in plan:
                agreed.add_request(RankRequest[plan[str(step)]])
            agreed.start_request_all_reduce()
            # The step's own communication, on the first group.
            dist.all_reduce(torch.ones(1000))
            asked = agreed.handle_signals_and_wait_for_agreed_request()
            if asked is RankRequest.SAVE:
                agreed.clear_save_request_and_agree()
            decided.append(asked.name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            agreed.agree_on_request_now()
    (folder / f"profiled_{rank}.json").write_text(
        json.dumps([event.name for event in profiler.events()])
    )
    (folder / f"decided_{rank}.json").write_text(json.dumps(decided))
    # A file's name need not be text: Python's \udc80 is the byte 0x80.
    texts = [group.gather(text) for text in (f"{rank} é \udc80" * (1 + 3 * rank), "")]
    mine = np.arange(4 * rank, dtype=np.int16).reshape(rank, 4)
    arrays = group.gather_arrays_on_rank_0(
        {"a/b": mine, "empty": np.zeros((0, 3)), "c": np.array([rank == 1])}
    )
    found = [{name: (str(a.dtype), a.tolist()) for name, a in each.items()} for each in arrays]
    (folder / f"gathered_{rank}.json").write_text(json.dumps([texts, found]))
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

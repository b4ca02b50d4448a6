"""One rank of two: engines under ZeRO 1, at highest, medium and highest again in one process.

test_matmul_precision_ranks.py starts it by torchrun. Arguments: a folder with the run folders, the
file to write, the engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.worker import __main__ as worker
from ortlaunch.worker import tasks
from ortlaunch.worker.process_group import distributed
from ortlaunch.worker.supervision.watchdog import Watchdog
from ortmodule_tests.leaving import leave

WORDS = ("highest", "medium", "highest")


def sum_of_gradients(engine: Any, batch: dict[str, torch.Tensor]) -> str:
    """Return the exact sum of every weight's gradient, in which all matmuls take part."""
    loss = engine.eval_module(**engine.to_device(batch))
    gradients = torch.autograd.grad(loss, [p for p in engine.plain.parameters() if p.requires_grad])
    # Hexadecimal text keeps every bit.
    return float(sum(gradient.double().sum() for gradient in gradients)).hex()


def plain_product() -> str:
    """Return the exact sum of a matmul of torch's own."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    return float((a @ b).double().sum()).hex()


def main() -> None:
    """Run each recipe in turn, in the process group of the first."""
    rank = Rank.from_environ(os.environ)
    found = []
    folder = Path(sys.argv[1])
    joined = distributed.join_process_group_until_end
    runs = [
        (name, word, RunDir(folder / f"{name}-{i}"))
        for name in sys.argv[3:]
        for i, word in enumerate(WORDS)
    ]
    torch.set_num_threads(1)

    def look(session: Any) -> None:
        engine = session.engine
        batches = session.batches
        group = session.group
        engine.stepper.run_micro_batch(
            engine.to_device(batches.read_micro_batch_and_count_tokens(0, 0, group.rank)),
            is_last_of_step=True,
        )
        engine.stepper.clip_step_and_clear_gradients(1e-3)
        mine = {
            "engine": engine.record.engine.used,
            "told": json_values_of_record(engine.record.matmul_precision),
            "inside": torch.get_float32_matmul_precision(),
            "product": plain_product(),
            "gradients": sum_of_gradients(
                engine, batches.read_micro_batch_and_count_tokens(1, 0, group.rank)
            ),
        }
        found.append(group.gather(mine))

    with joined(plan_of(runs[0][2]), rank, runs[0][2]) as group:

        @contextlib.contextmanager
        def again(*args: Any) -> Iterator[Any]:
            yield group

        # A process can join its group only once.
        distributed.join_process_group_until_end = again
        tasks.run = look
        for _, _, run in runs:
            worker.join_ranks_and_run_task(run, rank, Watchdog(rank, run))
            after = torch.get_float32_matmul_precision()
            found[-1] = [{**each, "after": after} for each in found[-1]]
        if group.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
        leave()


def plan_of(run: RunDir) -> Any:
    """Return the plan in a run folder."""
    from ortlaunch.launch_plan import Plan

    return Plan.from_plan_json_text(run.plan.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

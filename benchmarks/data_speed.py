"""Training on real data beside training on one cached batch: the same steps in turns, in one process, on the CPU.

    python benchmarks/data_speed.py [RECIPE] [--engine ort] [KEY=VALUE ...]

A B B A ..., a step each: neighbours on the machine come and go within seconds. The share is what training on real data
has of the speed on a batch that is always there: the median over pairs of neighbouring steps, by wall-clock and by the
process's CPU time. Real data are read between the steps, as `train` does on a CPU (on a GPU a thread reads ahead).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import Rank
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import Batches
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.progress import Progress

Took = list[tuple[float, float]]
PAIRS = 150  # after three that are not counted


class Cached(Batches):
    """Has one batch for all places."""

    def __init__(self, of: Batches) -> None:
        vars(self).update(vars(of))
        self.batch_of_all = of.micro_batch(0, 0, 0)

    def micro_batch(self, step: int, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
        return self.batch_of_all


def session_of(recipe: str, overrides: tuple[str, ...], folder: Path) -> Any:
    """Built as `train` builds it."""
    resolved = resolve(Path(recipe), overrides, LaunchOptions(), os.environ)
    made, plan = resolved.file.recipe, resolved.plan
    if made.engine.name == "ort":
        from ortlaunch.worker.engine.ort_settings import prepare

        prepare(made.engine)
    from ortlaunch.worker.session import build_session

    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    return build_session(made, plan, RunDir(folder), alone, Progress(rank=1))


def main(recipe: str, engine: str, *overrides: str) -> None:
    """Pairs, then a line a way."""
    from ortlaunch.worker.tasks.train import TrainState, train_step

    with tempfile.TemporaryDirectory() as folder:
        session = session_of(recipe, (f"engine.name={engine}", "train.max_steps=100000", *overrides), Path(folder))
        cached = dataclasses.replace(session, batches=Cached(session.batches))
        state = TrainState()
        took: tuple[Took, Took] = ([], [])
        gc.disable()
        for pair in range(PAIRS + 3):
            for way in (0, 1) if pair % 2 else (1, 0):
                begun, cpu = time.perf_counter(), time.process_time()
                train_step((cached, session)[way], state)
                state.step += 1
                took[way].append((time.perf_counter() - begun, time.process_time() - cpu))
            if pair % 10 == 0:
                gc.collect()
    print(f"{recipe} on {engine}, {session.plan.batch}, load {os.getloadavg()[0]:.1f}")
    for name, mine in zip(("cached", "real"), took):
        wall, cpu = (statistics.median(each) * 1e3 for each in zip(*mine[3:]))
        shares = (statistics.median(theirs[i] / ours[i] for theirs, ours in zip(took[0][3:], mine[3:])) for i in (0, 1))
        wall_share, cpu_share = shares
        print(
            f"  {name:8}{wall:9.1f} ms a step, CPU {cpu:8.1f} ms: {wall_share:.1%} of its speed, by CPU {cpu_share:.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="bert-large/tiny")
    parser.add_argument("overrides", nargs="*", help="of the recipe, KEY=VALUE")
    parser.add_argument("--engine", default="ort")
    asked = parser.parse_args()
    main(asked.recipe, asked.engine, *asked.overrides)

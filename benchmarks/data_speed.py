"""Training on real data beside training on one cached batch: the same steps in turns, in one process, on the CPU.

    python benchmarks/data_speed.py [RECIPE] [ENGINE] [KEY=VALUE ...]      bert-large/tiny, ort

A B B A ..., each turn some steps after one that is not counted; medians over all steps, of wall-clock and of the
process's CPU time. The share is what training on real data has of the speed on a batch that is always there: `thread`
ahead, as `train` reads text on a GPU; `loop` in between the steps, as it does on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import Rank
from ortlaunch.run.folder import RunDir
from ortlaunch.run.resolve import resolve
from ortlaunch.worker.data import Batches
from ortlaunch.worker.data.ahead import Reader
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.progress import Progress

TURNS, STEPS = 24, 3  # short turns: neighbours on the machine come and go within seconds
WAYS = {"cached": None, "thread": Reader(0), "loop": Reader(None)}


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
        from ortlaunch.worker.ort_settings import prepare

        prepare(made.engine)
    from ortlaunch.worker.session import build_session

    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    return build_session(made, plan, RunDir(folder), alone, Progress(rank=1))


@contextlib.contextmanager
def reading(session: Any, way: str) -> Iterator[Any]:
    """The session with its batches as `way` has them."""
    batches, reader = session.batches, WAYS[way]
    if reader is None:
        yield dataclasses.replace(session, batches=Cached(batches))
        return
    with batches.read_ahead(0, reader):
        yield session


def main(recipe: str, engine: str, *overrides: str) -> None:
    """Turns, then a line a way."""
    from ortlaunch.worker.tasks.train import TrainState, train_step

    with tempfile.TemporaryDirectory() as folder:
        session = session_of(recipe, (f"engine.name={engine}", "train.max_steps=100000", *overrides), Path(folder))
        state, took = TrainState(), {way: list[tuple[float, float]]() for way in WAYS}
        gc.disable()
        for turn in range(TURNS):
            for way in WAYS if turn % 2 else reversed(WAYS):
                with reading(session, way) as mine:
                    for number in range(STEPS + 1):
                        begun, cpu = time.perf_counter(), time.process_time()
                        train_step(mine, state)
                        state.step += 1
                        if number:
                            took[way].append((time.perf_counter() - begun, time.process_time() - cpu))
            gc.collect()
        print(f"{recipe} on {engine}, {session.plan.batch}, load {os.getloadavg()[0]:.1f}")
        medians = {way: [statistics.median(each) for each in zip(*steps)] for way, steps in took.items()}
        for way, (wall, cpu) in medians.items():
            shares = [theirs / ours for theirs, ours in zip(medians["cached"], (wall, cpu))]
            speed = f"{shares[0]:.1%} of its speed, by CPU {shares[1]:.1%}"
            print(f"  {way:8}{wall * 1e3:9.1f} ms a step, CPU {cpu * 1e3:8.1f} ms: {speed}")


if __name__ == "__main__":
    given = sys.argv[1:] or ["bert-large/tiny"]
    main(*(given if len(given) > 1 else [*given, "ort"]))
